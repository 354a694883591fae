"""Trains the `dynamix` policy in the simulator: a short cloning, regret in hindsight, then PPO on whole trainings.

Of each learner the checkpoint that is best on validation clusters is kept. PPO's policy is the result if it is ahead of
its starting point on validation seeds of the simulator's families, else the starting point is. A training that is
stopped and resumed ends with the same weights.
"""

import contextlib
import copy
import dataclasses
import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import ConfigError
from dynamix.policies.learned.policy import LEAST_GROWTH, MOST_GROWTH, TRUST, LearnedPolicy, ResidualNet
from dynamix_lab.simulator import BREAKING, CONFORMING, DEVELOPMENT
from dynamix_lab.training.cloning import demonstrate
from dynamix_lab.training.closed_loop import SCALE, paired_episode
from dynamix_lab.training.distributions import gaussian
from dynamix_lab.training.evaluation import (
    BASELINES,
    Factory,
    Tell,
    log_speeds,
    speeds_with_intervals,
    validation_score,
)
from dynamix_lab.training.hindsight import Decisions, RecordingEnv
from dynamix_lab.training.learner import descend, one_thread
from dynamix_lab.training.ppo import PPO, PPOConfig
from dynamix_lab.training.worlds import MIXED, lr_rule_of, sample_world

JUDGED = (*CONFORMING, *BREAKING, *DEVELOPMENT)  # the families on which policies with and without PPO are compared


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The recipe. Seeds of training clusters are derived from `seed`; validation and test seeds are never among them.

    A round is one rollout per entry of `workers`, and `epochs` passes over it. The first third of the rounds becomes
    harder step by step. In its first sixth W is at most `easy_workers`.

    workers            numbers of workers in rollouts
    easy_workers       the largest of them at the start
    rows               clusters times workers of an environment; at least six clusters
    intervals          steps of a window, of which each environment draws one
    delays             steps until a decision counts, of which each environment draws one
    clone_rounds       rounds that imitate references
    regret_rounds      rounds that learn in hindsight, from the window that followed
    windows            decisions of a rollout
    epochs             passes over a round
    rate               learning rate, falling to a twentieth
    batch              workers in a gradient step
    restraint          weight of the squared distance from the rule's sizes, in log sizes
    growth_price       log goodput that an e-fold of the global batch away from the rule's must be worth
    ppo_updates        updates by PPO on whole trainings, after all rounds
    ppo_workers        numbers of workers in its trainings
    ppo_windows        decisions of each of its trainings
    ppo_rate           learning rate of PPO, falling to a tenth
    ppo_log_std        log of the standard deviation of PPO's actions, in log sizes
    gamma              discount per decision; 0.95 counts some twenty windows
    anchor_weight      pull towards PPO's starting policy
    validate_every     rounds
    validation_workers   numbers of workers in the clusters for choosing checkpoints
    validation_rows    clusters times workers for choosing checkpoints, for each number of workers
    validation_windows   decisions for choosing checkpoints, and for comparing policies with and without PPO
    judged_workers     numbers of workers for comparing policies with and without PPO
    judged_rows        clusters times workers for that comparison, for each family and number of workers
    families           number of the simulator's families for comparing policies with and without PPO
    hidden             width of the network
    world              whose clusters to train on: mixed, a family, or your own MODULE:NAME or FILE.py:NAME
    """

    workers: tuple[int, ...] = (2, 4, 8, 32, 128, 256)
    easy_workers: int = 32
    rows: int = 768
    intervals: tuple[int, ...] = (1, 2, 3, 5, 10, 10)
    delays: tuple[int, ...] = (1, 1, 4)
    clone_rounds: int = 1
    regret_rounds: int = 40
    windows: int = 32
    epochs: int = 3
    rate: float = 1.5e-3
    batch: int = 1024
    restraint: float = 0.01
    growth_price: float = 0.05
    ppo_updates: int = 6
    ppo_workers: tuple[int, ...] = (2, 8, 32, 128)
    ppo_windows: int = 40
    ppo_rate: float = 3e-4
    ppo_log_std: float = -2.7
    gamma: float = 0.95
    anchor_weight: float = 0.0005
    validate_every: int = 4
    validation_workers: tuple[int, ...] = (2, 8, 32, 128)
    validation_rows: int = 512
    validation_windows: int = 50
    judged_workers: tuple[int, ...] = (8, 32)
    judged_rows: int = 128
    families: int = 21
    hidden: int = 64
    world: str = MIXED

    def __post_init__(self) -> None:
        if not 1 <= self.families <= len(JUDGED):
            fix = "the comparison of policies with and without PPO takes the first of them"
            raise ConfigError("families", self.families, f"1 to {len(JUDGED)}", fix)


Arrays = dict[str, np.ndarray]
_HERE = SimpleNamespace(map=map)  # the part of an executor that training uses, within this process
VALIDATION_SEED, CHOICE_SEED, TEST_SEED = 900_001, 920_001, 991_001
PPO_VALIDATES_EVERY = 2  # updates; even a few of them matter
PLAIN, TUNED = "without PPO", "with PPO"  # the stages, as policy files name them


def train(
    config: TrainingConfig | None = None,
    seed: int = 0,
    *,
    progress: Tell | None = None,
    checkpoint: str | Path | None = None,
    processes: int = 1,
    tested: bool = False,
) -> LearnedPolicy:
    """Train a policy from scratch, in minutes on 2 cores. The same config and seed give the same weights.

    progress     called at times as `progress(what, fraction done)`
    checkpoint   file written after every round; a training found there is resumed
    processes    for rollouts; their number changes the time taken, not the weights
    tested       also score both stages on test clusters, after all choices (`about["evaluation"]`)
    """
    with one_thread(), _pool(processes) as pool:
        training = ResidualTraining(config or TrainingConfig(), seed)
        training.pool = pool
        tell = progress or (lambda what, fraction: None)
        training.run(tell, Path(checkpoint) if checkpoint else None)
        result = training.result(tell)
        if tested:
            made = {**BASELINES, **_factories(training.stages())}
            result.about["evaluation"] = _scored(training.config, made, TEST_SEED, tell)
    return result


def _factories(nets: dict[str, ResidualNet]) -> dict[str, Factory]:
    return {name: (lambda _, net=net: LearnedPolicy(net)) for name, net in nets.items()}  # type: ignore[misc]


def _scored(c: TrainingConfig, made: dict[str, Factory], seed: int, tell: Tell) -> dict[str, Any]:
    """Speed over the goodput rule's on clusters of one seed, for the policy file."""
    families = JUDGED[: c.families] if c.world == MIXED else (c.world,)
    size: dict[str, Any] = {"workers": c.judged_workers, "rows": c.judged_rows, "windows": c.validation_windows}
    logs = log_speeds(made, [seed], families=families, **size, tell=lambda what: tell(what, 1.0))
    found: dict[str, Any] = {"seed": seed, "families": len(families)}
    found["speed_over_goodput"] = {name: speeds_with_intervals(by_w) for name, by_w in logs.items()}
    if PLAIN in logs and TUNED in logs:
        apart = {w: logs[TUNED][w] - logs[PLAIN][w] for w in c.judged_workers}
        found["ppo_over_without"] = speeds_with_intervals(apart)
    return found


class ResidualTraining:
    """The state of a training at the end of a round; `state_dict` holds everything that the next one depends on."""

    def __init__(self, config: TrainingConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = ResidualNet(hidden=config.hidden)
        self.pool: Any = _HERE
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.best, self.best_score = copy.deepcopy(self.net), -np.inf
        self.tuned, self.tuned_score = copy.deepcopy(self.net), -np.inf  # PPO's best
        self.scores: list[list[float]] = []  # round, score
        self.round, self.rounds = 0, config.clone_rounds + config.regret_rounds + config.ppo_updates
        self.ppo: PPO | None = None

    def run(self, tell: Tell, checkpoint: Path | None) -> None:
        """The remaining rounds."""
        if checkpoint is not None and checkpoint.exists():
            self.load_state_dict(torch.load(checkpoint, weights_only=True))
        while self.round < self.rounds:
            stage, loss = self._learn()
            self.round += 1
            said = f"{stage} {self.round}: {loss:.4f}"
            stage_ends = self.round in (self.config.clone_rounds + self.config.regret_rounds, self.rounds)
            every = self.config.validate_every if self.ppo is None else PPO_VALIDATES_EVERY
            if stage_ends or self.round % every == 0:
                score = self._validate()
                said += f", validation {score:.4f}"
            tell(said, self.round / self.rounds)
            if checkpoint is not None:
                torch.save(self.state_dict(), checkpoint)

    def stages(self) -> dict[str, ResidualNet]:
        """The best network without PPO, and PPO's best if PPO ran."""
        nets = {PLAIN: self.best} if self.ppo is None else {PLAIN: self.best, TUNED: self.tuned}
        return copy.deepcopy(nets)

    def result(self, tell: Tell = lambda what, done: None) -> LearnedPolicy:
        """The better stage as a policy; PPO's only if the whole interval shows that it is faster."""
        nets, chosen = self.stages(), PLAIN
        about = {"training": dataclasses.asdict(self.config), "seed": self.seed, "validation": self.scores}
        about |= {"trust": TRUST}
        if self.ppo is not None:
            judged = _scored(self.config, _factories(nets), CHOICE_SEED, tell)
            chosen = TUNED if judged["ppo_over_without"]["all"][1] > 1 else PLAIN
            about["stages"] = {**judged, "chosen": chosen}
        return LearnedPolicy(nets[chosen], about=about)

    def _learn(self) -> tuple[str, float]:
        c, i, rounds = self.config, self.round, self.config.clone_rounds + self.config.regret_rounds
        if i >= rounds:
            return "ppo", self._improve()
        hardness, easy = min(1.0, 0.4 + 1.8 * i / rounds), 6 * i < rounds
        stage = "clone" if i < c.clone_rounds else "regret"
        guided = 0.5**i if stage == "clone" else None
        work = [(c, self._seed(w), w, hardness, guided) for w in c.workers if not easy or w <= c.easy_workers]
        weights = {name: value.numpy() for name, value in self.net.state_dict().items()}
        # The largest take longest, so they start first. The order of the parts does not change.
        played = list(self.pool.map(partial(_play, weights), reversed(work)))[::-1]
        parts = [Decisions(**{name: torch.from_numpy(value) for name, value in one.items()}) for one in played]
        for group in self.optimizer.param_groups:
            group["lr"] = c.rate * (1 - 0.95 * i / rounds)
        return stage, float(np.mean([self._pass(parts, stage) for _ in range(c.epochs)]))

    def _seed(self, workers: int) -> int:
        return self.seed * 1_000_000 + 1_000 * self.round + workers

    def _env(self, workers: int) -> RecordingEnv:
        return _environment(self.config, self._seed(workers), workers, 1.0)

    def _pass(self, parts: list[Decisions], stage: str) -> float:
        """Make one pass over the round's decisions. Returns the mean loss."""
        work = []
        for part in parts:
            rows = max(self.config.batch // part.wish.shape[1], 8)
            work += [(part, some) for some in torch.randperm(len(part), generator=self.generator).split(rows)]
        losses = []
        for i in torch.randperm(len(work), generator=self.generator).tolist():
            part, rows_at = work[i]
            loss = self._loss(part.take(rows_at), stage)
            descend(self.net, self.optimizer, loss)
            losses.append(float(loss.detach()))
        return float(np.mean(losses))

    def _loss(self, some: Decisions, stage: str) -> Tensor:
        local, shared, _ = self.net(some.observed, some.mask)
        delta, growth = local.squeeze(-1), shared.squeeze(-1)
        sizes = some.sizes(delta, growth)
        strayed = (sizes / some.wish).log().square().mean()
        if stage == "clone":
            # Huber: an unpredictable slowdown must not outweigh everything that can be learned.
            missed = sizes.log() - some.target.clamp(some.low, some.high).log()
            cloned: Tensor = torch.nn.functional.huber_loss(missed, torch.zeros_like(missed), delta=0.3)
            return cloned
        asked = some.wish.clamp(some.low, some.high)
        with torch.no_grad():
            rule = some.log_goodput(asked)
        # Actions beyond the limits have no gradient, so a soft penalty pulls them back.
        beyond = delta.abs() - 1.2, growth - MOST_GROWTH, LEAST_GROWTH + 0.2 - growth
        outside = sum((part.clamp(min=0).square().mean() for part in beyond), start=torch.zeros(()))
        loss: Tensor = (rule - some.log_goodput(sizes)).mean() + self.config.restraint * strayed + outside
        return loss + self.config.growth_price * (sizes.sum(-1) / asked.sum(-1)).log().abs().mean()

    def _improve(self) -> float:
        """Make one update of PPO. Returns the mean regret of its rollouts."""
        c, ppo = self.config, self.ppo or self._start_ppo()
        played = [paired_episode(ppo, self._env(w), self._env(w), windows=c.ppo_windows) for w in c.ppo_workers]
        done = (self.round - c.clone_rounds - c.regret_rounds) / c.ppo_updates
        for group in ppo.optimizer.param_groups:
            group["lr"] = c.ppo_rate * (1 - 0.9 * done)
        ppo.update(played)
        return -float(np.mean([float(episode.reward.mean()) for episode in played])) / SCALE

    def _start_ppo(self) -> PPO:
        c = self.config
        self.net.load_state_dict(self.best.state_dict())
        with torch.no_grad():
            self.net.log_std_local.fill_(c.ppo_log_std)
            self.net.log_std_shared.fill_(c.ppo_log_std)
        config = PPOConfig(c.ppo_rate, c.gamma, 0.95, 0.1, 3, 256, anchor_weight=c.anchor_weight, max_gradient_norm=1.0)
        self.ppo = PPO(self.net, gaussian, config, seed=self.seed)
        self.ppo.anchor = copy.deepcopy(self.net)
        return self.ppo

    def _validate(self) -> float:
        c = self.config
        size = {"rows": c.validation_rows, "windows": c.validation_windows}
        score = validation_score(
            lambda _: LearnedPolicy(self.net), VALIDATION_SEED, workers=c.validation_workers, world=c.world, **size
        )
        self.scores.append([self.round, round(score, 4)])
        if self.ppo is not None and score > self.tuned_score:
            self.tuned, self.tuned_score = copy.deepcopy(self.net), score
        if self.ppo is None and score > self.best_score:
            self.best, self.best_score = copy.deepcopy(self.net), score
        return score

    def _parts(self) -> dict[str, Any]:
        """The parts that have a state of their own."""
        parts = {"net": self.net, "optimizer": self.optimizer, "best": self.best, "tuned": self.tuned}
        return parts if self.ppo is None else {**parts, "ppo": self.ppo, "anchor": self.ppo.anchor}

    def state_dict(self) -> dict[str, Any]:
        state = {"config": str(self.config), "seed": self.seed, "generator": self.generator.get_state()}
        state |= {
            "round": self.round,
            "scores": self.scores,
            "best_score": self.best_score,
            "tuned_score": self.tuned_score,
            "ppo": None,
            "anchor": None,
        }
        return state | {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. Raises `ConfigError` if it is from another recipe or seed."""
        if (state["config"], state["seed"]) != (str(self.config), self.seed):
            raise ConfigError("checkpoint", "of another recipe or seed", "the one begun there", "name another file")
        self.round, self.scores, self.best_score = state["round"], state["scores"], state["best_score"]
        self.tuned_score = state["tuned_score"]
        self.generator.set_state(state["generator"])
        if state["ppo"] is not None:
            self._start_ppo()
        for name, part in self._parts().items():
            part.load_state_dict(state[name])


def choice(about: Mapping[str, Any]) -> str:
    """Why the network in a policy file is not PPO's, from the file's description; empty if it is PPO's."""
    recipe, stages, why = about["training"], about.get("stages"), "ppo_updates is 0"
    if stages is not None:
        ratio, low, high = stages["ppo_over_without"]["all"]
        why = f"with PPO it is {ratio:.3f} times as fast; the interval, {low:.3f} to {high:.3f}, is not all above 1"
    if stages is not None and stages["chosen"] == TUNED:
        return ""
    before = recipe["clone_rounds"] + recipe["regret_rounds"]
    rest = "" if before else ", nor in a round before, so it decides as the goodput rule"
    return f"the chosen network was not trained by PPO{rest}: {why}"


@contextlib.contextmanager
def _pool(processes: int) -> Iterator[Any]:
    if processes <= 1:
        yield _HERE
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def _environment(c: TrainingConfig, seed: int, workers: int, hardness: float) -> RecordingEnv:
    pick = np.random.default_rng([seed, 2])
    clusters = sample_world(c.world, max(c.rows // workers, 6), workers, seed, hardness=hardness)
    interval, delay = int(pick.choice(c.intervals)), int(pick.choice(c.delays))
    return RecordingEnv(clusters, seed=seed, interval=interval, delay=delay, lr_rule=lr_rule_of(c.world))


def _play(weights: Arrays, job: tuple[TrainingConfig, int, int, float, float | None]) -> Arrays:
    """One rollout as plain arrays, in any process."""
    config, seed, workers, hardness, guided = job
    net = ResidualNet(hidden=config.hidden)
    net.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
    env = _environment(config, seed, workers, hardness)
    played = demonstrate(net, env, windows=config.windows, seed=seed, guided=guided)
    return {f.name: getattr(played, f.name).numpy() for f in dataclasses.fields(played)}
