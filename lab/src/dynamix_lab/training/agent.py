"""Agents that set the global batch and the learning rate, paid at the end of a budget: time and score as one figure.

`Search` (CMA-ES, Hansen, arXiv 1604.00772) looks for the weights of a linear agent, `Gradient` (PPO) learns a small
network. Both meet whole trainings of real jobs (`real_jobs`), of kinds that the test never has.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.window import Floats
from dynamix_lab.training.distributions import gaussian
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.ppo import PPO, PPOConfig
from dynamix_lab.training.real_jobs import (
    FEATURES,
    KINDS,
    MULTIPLES,
    RATES,
    Decide,
    RealJob,
    Rule,
    Seen,
    corrected,
    fixed,
    goodput,
    train,
)

RULES: Mapping[str, Rule] = {"balance": fixed, "adapt": goodput}
CUT = 2.0  # of log time: one ruined training must not outweigh all others
HIDDEN = 32


def prepared(job: RealJob) -> RealJob | None:
    """The job with its best rate and the curve of a fixed batch; None if nothing can be read from its curve."""
    _, _, sgd, adamw, _ = KINDS[job.kind]
    base = sgd if job.optimizer == "sgd" else adamw
    base *= job.batch / 128 if job.optimizer == "sgd" else math.sqrt(job.batch / 128)
    tried = [dataclasses.replace(job, rate=base * factor) for factor in RATES]
    scores = [train(one, corrected(one, fixed), repeat=900).score for one in tried]
    best = tried[int(np.argmax(scores))]
    ends = [
        (math.log(m), train(best, corrected(best, fixed), multiple=m, repeat=r).score)
        for m in MULTIPLES
        for r in (902, 903)
    ]
    at, reached = np.array(ends).T
    curve = np.polyfit(at, reached, 2)
    rise = float(np.polyval(curve, math.log(2.0)) - np.polyval(curve, math.log(0.5)))
    scatter = float(np.std(reached - np.polyval(curve, at)))
    if rise < 4 * scatter or rise < 0.01:  # a score that time hardly changes says nothing about time
        return None
    return dataclasses.replace(best, curve=tuple(float(c) for c in curve))


def cost(job: RealJob, decide: Decide, repeat: int) -> float:
    """log of the time that was taken, over that in which a fixed batch ends with the same score."""
    end = train(job, decide, repeat=repeat)
    return min(max(math.log(end.time) - job.equivalent(end.score), -CUT), CUT)


class Agent(Protocol):
    """Something that can be asked in another process."""

    def __call__(self, job: RealJob) -> Decide: ...


@dataclasses.dataclass(frozen=True)
class Linear:
    """A rule, corrected by weights (2, FEATURES) for batch and rate; without weights the rule itself."""

    weights: tuple[float, ...] = ()
    rule: str = "adapt"

    def __call__(self, job: RealJob) -> Decide:
        if not self.weights:
            return corrected(job, RULES[self.rule])
        matrix = np.reshape(self.weights, (2, FEATURES))

        def correction(seen: Seen) -> tuple[float, float]:
            batch, rate = matrix @ seen.features
            return float(batch), float(rate)

        return corrected(job, RULES[self.rule], correction)

    def beside(self, rule: str, *, only: str = "") -> Linear:
        """The same corrections of another rule; `only` those of "batch" or of "rate"."""
        matrix = np.reshape(self.weights, (2, FEATURES)).copy()
        if only:
            matrix[1 if only == "batch" else 0] = 0.0
        return Linear(tuple(map(float, matrix.reshape(-1))), rule)


def judged(agent: Agent, job: RealJob, repeat: int) -> float:
    """`cost` of an agent."""
    return cost(job, agent(job), repeat)


def costs(pool: Executor, agents: Sequence[Agent], jobs: Sequence[RealJob], repeats: Sequence[int]) -> Floats:
    """Of each agent on each job and repeat, (agents, jobs, repeats)."""
    asked = [(agent, job, repeat) for agent in agents for job in jobs for repeat in repeats]
    found = list(pool.map(judged, *zip(*asked, strict=True), chunksize=2))
    return np.array(found).reshape(len(agents), len(jobs), len(repeats))


class Search:
    """CMA-ES over weights of `Linear` that begin at 0, which is `adapt`.

    free   places in (2, FEATURES) of the weights that it may set; all others stay 0
    """

    def __init__(self, seed: int, free: Sequence[int], step: float, population: int, jobs_each: int) -> None:
        import cma  # type: ignore[import-untyped, import-not-found, unused-ignore]

        options = {"seed": seed, "popsize": population, "verbose": -9}
        self.strategy = cma.CMAEvolutionStrategy(np.zeros(len(free)), step, options)
        self.free, self.jobs_each, self.generation = tuple(free), jobs_each, 0
        self.rng = np.random.default_rng(seed)

    def go_on(self, jobs: Sequence[RealJob], pool: Executor) -> float:
        """One generation; the mean time of its candidates over that of `adapt` on the same jobs."""
        some = [jobs[i] for i in self.rng.choice(len(jobs), min(self.jobs_each, len(jobs)), replace=False)]
        asked = self.strategy.ask()
        found = costs(pool, [Linear(), *map(self._agent, asked)], some, [self.generation]).mean((1, 2))
        self.strategy.tell(asked, list(found[1:]))
        self.generation += 1
        return float(np.exp(found[1:].mean() - found[0]))

    def _agent(self, values: Sequence[float]) -> Linear:
        weights = np.zeros(2 * FEATURES)
        weights[list(self.free)] = values
        return Linear(tuple(map(float, weights)))

    @property
    def agent(self) -> Linear:
        """The mean of the distribution."""
        return self._agent(self.strategy.mean)


class ActorCritic(nn.Module):
    """Two actions, the corrections of batch and rate, which begin at 0; and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.mean, self.value = nn.Linear(HIDDEN, 2), nn.Linear(HIDDEN, 1)
        nn.init.zeros_(self.mean.weight)
        nn.init.zeros_(self.mean.bias)
        self.log_std_local = nn.Parameter(torch.full((2,), math.log(0.25)))
        self.log_std_shared = nn.Parameter(torch.zeros(0))

    def forward(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(observed[:, 0])
        return self.mean(hidden)[:, None], observed.new_zeros(len(observed), 0), self.value(hidden)[:, 0]


@dataclasses.dataclass(frozen=True)
class Network:
    """The mean actions of a network."""

    weights: Mapping[str, Tensor]

    def __call__(self, job: RealJob) -> Decide:
        net = _net(self.weights)

        def correction(seen: Seen) -> tuple[float, float]:
            with torch.no_grad():
                batch, rate = net(_observed(seen), torch.ones(1, 1, dtype=torch.bool))[0][0, 0].tolist()
            return batch, rate

        return corrected(job, goodput, correction)


def _net(weights: Mapping[str, Tensor]) -> ActorCritic:
    with torch.random.fork_rng(devices=[]):
        net = ActorCritic()
    net.load_state_dict(dict(weights))
    return net


def _observed(seen: Seen) -> Tensor:
    return torch.from_numpy(seen.features).float().view(1, 1, FEATURES)


def explored(weights: Mapping[str, Tensor], job: RealJob, repeat: int, seed: int) -> Episode:
    """An episode with drawn actions: a reward of 0 in each window, and at the end minus the cost."""
    net, generator = _net(weights), torch.Generator().manual_seed(seed)
    rows, actions = list[Tensor](), list[Tensor]()

    def correction(seen: Seen) -> tuple[float, float]:
        rows.append(_observed(seen))
        with torch.no_grad():
            drawn, _ = gaussian(net, rows[-1], torch.ones(1, 1, dtype=torch.bool))[0].sample(generator)
        actions.append(drawn)
        batch, rate = drawn[0, 0].tolist()
        return batch, rate

    paid = -cost(job, corrected(job, goodput, correction), repeat)
    count = len(rows) - 1  # what was decided after the last window changed nothing
    reward, done = torch.zeros(count, 1), torch.zeros(count, 1, dtype=torch.bool)
    reward[-1], done[-1] = paid, True
    mask = torch.ones(count, 1, 1, dtype=torch.bool)
    observed = torch.stack(rows[:count])
    return Episode(
        observed, mask, torch.stack(actions[:count]), reward, torch.ones(count, 1), rows[-1], mask[-1], done=done
    )


class Gradient:
    """PPO on whole trainings. What `adapt` takes for a job is taken off, so that no action is blamed for a hard job."""

    def __init__(self, seed: int, jobs_each: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = ActorCritic()
        config = PPOConfig(1e-3, 1.0, 0.97, epochs=4, minibatch=256, entropy_weight=0.0)
        self.ppo, self.rng = PPO(net, gaussian, config, seed=seed), np.random.default_rng(seed)
        self.jobs_each, self.generation = jobs_each, 0
        self.rules: Floats | None = None

    def go_on(self, jobs: Sequence[RealJob], pool: Executor) -> float:
        """One update; the mean time with drawn actions over that of `adapt` on the same jobs."""
        if self.rules is None:
            self.rules = costs(pool, [Linear()], jobs, range(800, 802))[0].mean(1)
        some = self.rng.choice(len(jobs), self.jobs_each, replace=True)
        weights = {name: value.clone() for name, value in self.ppo.net.state_dict().items()}
        seeds = [int(s) for s in self.rng.integers(1 << 31, size=len(some))]
        asked = [(weights, jobs[i], self.generation, s) for i, s in zip(some, seeds, strict=True)]
        played = list(pool.map(explored, *zip(*asked, strict=True)))
        mine, rules = np.array([-float(episode.reward[-1]) for episode in played]), self.rules[some]
        for episode, rule in zip(played, rules, strict=True):
            episode.reward[-1] += float(rule)
        self.ppo.update(played)
        self.generation += 1
        return float(np.exp((mine - rules).mean()))

    @property
    def agent(self) -> Agent:
        """The mean actions."""
        return Network({name: value.clone() for name, value in self.ppo.net.state_dict().items()})


RATE = FEATURES
LEARNERS: Mapping[str, Callable[[int], Any]] = {
    "schedule": lambda seed: Search(seed, (RATE, RATE + 1), 0.25, 8, 16),
    "four": lambda seed: Search(seed, (0, 1, RATE, RATE + 1), 0.25, 8, 16),
    "sixteen": lambda seed: Search(seed, range(2 * FEATURES), 0.1, 8, 16),
    "ppo": lambda seed: Gradient(seed, 64),
}
"""`schedule` sets the rate alone, by the part of the budget that is done: anyone can write that down. `four` sets the
batch too, by the same; `sixteen` and `ppo` see all features."""
UPDATES = {"schedule": 16, "four": 26, "sixteen": 30, "ppo": 40}


def packed(learner: Any) -> str:
    """A learner as text, with all that it needs to go on."""
    return base64.b64encode(pickle.dumps(learner)).decode()


def unpacked(text: str) -> Any:
    """The inverse of `packed`; only for what this command has written itself."""
    return pickle.load(io.BytesIO(base64.b64decode(text)))
