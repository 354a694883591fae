"""Training of `dynamix-paper`, the paper's own form, in the calibrated simulator.

Episodes are from all families and several W. An optional warm start imitates the lagged reference by the nearest action
(DAgger). The stored checkpoint is the best on validation clusters, which are never used for training.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor

from dynamix.errors import ConfigError
from dynamix.policies.protocol import Policy
from dynamix.window import Floats, Ints, Window
from dynamix_lab.papers.additive import Actions, AdditiveNet, AdditivePolicy
from dynamix_lab.simulator import TRAINING, ClusterEnv, LaggedReference, rollout_path
from dynamix_lab.training.cloning import perturbed
from dynamix_lab.training.distributions import Categorical, categorical
from dynamix_lab.training.episodes import Episode, play
from dynamix_lab.training.evaluation import Tell
from dynamix_lab.training.learner import descend, one_thread
from dynamix_lab.training.ppo import PPO, PPOConfig
from dynamix_lab.training.rewards import Reward, SimulatedPaper, SimulatedRegret
from dynamix_lab.training.simplified import Simplified, SimplifiedConfig
from dynamix_lab.training.worlds import lr_rule_of, sample_world

Labelled = tuple[Tensor, Tensor]  # what a policy saw, and the action that it should have taken
VALIDATION_SEED, TEST_SEED = 920_001, 930_001
# Of the learner "ppo"; gamma (0.8) is per second.
PER_SECOND = PPOConfig(5e-4, 0.8, 0.9, epochs=3, worker_rows=4096, entropy_weight=0.002, max_gradient_norm=1.0)


@dataclass(frozen=True, slots=True)
class PaperTrainingConfig:
    """The recipe. Seeds of training clusters are derived from `seed`; validation and test seeds are never among them.

    learner        "ppo" (ppo.py) or "simplified" (simplified.py)
    reward         "regret", or the paper's "sgd" and "adam" (rewards.py)
    without        families of the state to leave out: network, system, statistics
    actions        samples that an action adds or removes, and how they scale
    hidden         width of the network
    families       families, and worlds (`worlds.py`), of the episodes
    workers        numbers of workers in episodes
    intervals      steps of a window, of which each episode draws one
    delays         steps until a decision applies, of which each episode draws one
    rows           clusters times workers of an episode
    windows        decisions of an episode
    updates        of the learner
    clone_rounds   rounds of imitation before learning by reward; 0: none, as in the paper
    clone_windows  decisions of a round of imitation
    clone_epochs   passes over the data in a round of imitation
    clone_keep     rounds whose data imitation keeps
    clone_rate     learning rate of imitation
    validate_every   updates between validations
    validation_workers    numbers of workers in the clusters for choosing checkpoints; families take them in turn
    validation_clusters   clusters of each family for choosing checkpoints
    validation_windows    decisions in the clusters for choosing checkpoints
    """

    learner: Literal["ppo", "simplified"] = "ppo"
    reward: Literal["regret", "sgd", "adam"] = "regret"
    without: tuple[str, ...] = ()
    actions: Actions = dataclasses.field(default_factory=Actions)
    hidden: int = 64
    families: tuple[str, ...] = TRAINING
    workers: tuple[int, ...] = (2, 4, 8, 16, 32)
    intervals: tuple[int, ...] = (5, 5, 10)
    delays: tuple[int, ...] = (1, 1, 4)
    rows: int = 256
    windows: int = 32
    updates: int = 60
    clone_rounds: int = 24
    clone_windows: int = 24
    clone_epochs: int = 2
    clone_keep: int = 6
    clone_rate: float = 2e-3
    validate_every: int = 10
    validation_workers: tuple[int, ...] = (4, 16)
    validation_clusters: int = 8
    validation_windows: int = 40

    def __post_init__(self) -> None:
        for name, allowed in (("learner", ("ppo", "simplified")), ("reward", ("regret", "sgd", "adam"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(name, getattr(self, name), ", ".join(allowed), "choose one of them")


def train(config: PaperTrainingConfig | None = None, seed: int = 0, *, progress: Tell | None = None) -> AdditivePolicy:
    """Train a policy from scratch. The same config and seed give the same weights. `progress(what, fraction done)`."""
    with one_thread():
        return _train(config or PaperTrainingConfig(), seed, progress or (lambda what, fraction: None))


def _train(c: PaperTrainingConfig, seed: int, tell: Tell) -> AdditivePolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = AdditiveNet(c.actions, hidden=c.hidden)
    seen, judge = _Seen(net.inputs), _Validation(c, c.validation_workers, c.validation_clusters, VALIDATION_SEED)
    scores = [score := judge(AdditivePolicy(net, without=c.without))]
    best = copy.deepcopy(net)
    tell(f"untrained: {score:.4f}", 0.0)
    learning_from = 0.25 if c.clone_rounds else 0.0
    if c.clone_rounds:
        _clone(net, c, seed, seen, lambda what, done: tell(what, done * learning_from))
    learner = make_learner(net, c, seed)
    for i in range(c.updates + 1):
        if (i and (i % c.validate_every == 0 or i == c.updates)) or (i == 0 and c.clone_rounds):
            scores.append(score := judge(AdditivePolicy(net, without=c.without)))
            if score > max(scores[:-1]):
                best = copy.deepcopy(net)
            tell(f"update {i}: {score:.4f}", learning_from + (1 - learning_from) * i / max(c.updates, 1))
        if i < c.updates:
            episodes = [_episode(learner, net, c, w, [seed, 2, i, w]) for w in c.workers]
            for episode in episodes:
                seen.add(episode.observed)
            learner.update(episodes)
    best.fold(*seen.constant())
    about = {"training": json.loads(json.dumps(dataclasses.asdict(c))), "seed": seed}
    return AdditivePolicy(best, without=c.without, about={**about, "validation": [round(s, 4) for s in scores]})


def make_learner(net: AdditiveNet, config: PaperTrainingConfig, seed: int) -> PPO | Simplified:
    """The recipe's learner."""
    if config.learner == "simplified":
        return Simplified(net, SimplifiedConfig(), seed=seed)
    return PPO(net, categorical, PER_SECOND, seed=seed)


def evaluation(policy: AdditivePolicy, config: PaperTrainingConfig) -> dict[str, Any]:
    """The policy file's figures on test clusters, which were never used before."""
    scores = {str(w): round(_Validation(config, (w,), 2 * 8, TEST_SEED)(policy), 4) for w in (2, 8, 32)}
    return {"seed": TEST_SEED, "goodput_over_lagged_reference_by_workers": scores}


def _env(c: PaperTrainingConfig, workers: int, key: Sequence[int]) -> ClusterEnv:
    """Clusters of one family, drawn from `key`; the same key gives the same world."""
    pick = np.random.default_rng(key)
    family, seed = str(pick.choice(c.families)), int(pick.integers(1, 900_000))
    clusters = sample_world(family, max(c.rows // workers, 4), workers, seed)
    interval, delay = int(pick.choice(c.intervals)), int(pick.choice(c.delays))
    return ClusterEnv(clusters, seed=seed, interval=interval, delay=delay, lr_rule=lr_rule_of(family))


def _episode(
    learner: PPO | Simplified, net: AdditiveNet, c: PaperTrainingConfig, workers: int, key: Sequence[int]
) -> Episode:
    env, twin = _env(c, workers, key), _env(c, workers, key)
    reward: Reward = SimulatedRegret(env, twin) if c.reward == "regret" else SimulatedPaper(env, c.reward)
    window = env.step(perturbed(env.reset().batch_size, env, np.random.default_rng([*key, 1]), 0.5, 0.5))
    reward.update(window)
    return play(env, AdditivePolicy(net, without=c.without), learner.choose, reward, window, c.windows)


def _clone(net: AdditiveNet, c: PaperTrainingConfig, seed: int, seen: _Seen, tell: Tell) -> None:
    """DAgger (Ross et al. 2011): label every state visited with the action nearest the lagged reference's size."""
    optimizer = torch.optim.Adam(net.parameters(), lr=c.clone_rate)
    generator, data = Generator().manual_seed(seed), list[Labelled]()
    for i in range(c.clone_rounds):
        for group in optimizer.param_groups:
            group["lr"] = c.clone_rate * (1 - 0.9 * i / c.clone_rounds)
        data += [_demonstrate(net, c, w, [seed, 3, i, w], 0.5**i, generator) for w in c.workers]
        data = data[-c.clone_keep * len(c.workers) :]
        for observed, _ in data[-len(c.workers) :]:
            seen.add(observed)
        loss = 0.0
        for _ in range(c.clone_epochs):
            loss = _fit(net, optimizer, data, generator)
        tell(f"clone {i + 1}: loss {loss:.4f}", (i + 1) / c.clone_rounds)


@torch.no_grad()
def _demonstrate(
    net: AdditiveNet, c: PaperTrainingConfig, workers: int, key: Sequence[int], guided: float, generator: Generator
) -> Labelled:
    """States and labels of one roll-out; clusters follow the labels with probability `guided`, else the student."""
    env, rng = _env(c, workers, key), np.random.default_rng([*key, 1])
    teacher, student = LaggedReference(env), AdditivePolicy(net, without=c.without)
    follow = rng.random((env.clusters.shape[0], 1)) < guided
    window = env.step(perturbed(env.reset().batch_size, env, rng, 0.5, 0.5))
    rows = []
    for _ in range(c.clone_windows):
        observed, label = student.observe(window), nearest_action(c.actions, window, teacher.target())
        rows.append((torch.from_numpy(observed), torch.from_numpy(label)))
        logits, _ = net(rows[-1][0], torch.from_numpy(window.batch_size > 0))
        mine = Categorical(logits).sample(generator)[0].numpy()
        window = env.step(student.allocate(window, env.bounds, np.where(follow, label, mine)))
    observed_all, labels = (torch.cat(part) for part in zip(*rows, strict=True))
    return observed_all, labels


def nearest_action(actions: Actions, window: Window, target: Floats) -> Ints:
    """Index (..., W) of the action whose size is nearest `target` (..., W), by ratio."""
    options = [actions.sizes(window, np.full(target.shape, a)) for a in range(len(actions.steps))]
    distance = np.abs(np.log(np.maximum(np.stack(options, -1), 0.5)) - np.log(np.maximum(target, 0.5))[..., None])
    # Of equal ones (at a clamp) take the smallest step.
    distance = distance + 1e-6 * np.abs(np.asarray(actions.steps)) / max(map(abs, actions.steps))
    return np.asarray(distance.argmin(-1), dtype=np.int64)


def _fit(net: AdditiveNet, optimizer: torch.optim.Optimizer, data: list[Labelled], generator: Generator) -> float:
    work = []
    for observed, labels in data:
        order = torch.randperm(len(labels), generator=generator)
        work += [(observed, labels, rows) for rows in order.split(max(1024 // labels.shape[-1], 16))]
    total = 0.0
    for i in torch.randperm(len(work), generator=generator).tolist():
        observed, labels, rows = work[i]
        logits, _ = net(observed[rows], torch.ones(labels[rows].shape, dtype=torch.bool))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten())
        descend(net, optimizer, loss)
        total += float(loss.detach())
    return total / len(work)


class _Validation:
    """Geometric mean over families and W of average goodput / the lagged reference's; 1 is the reference."""

    def __init__(self, c: PaperTrainingConfig, workers: tuple[int, ...], clusters: int, seed: int) -> None:
        self.cells = [(family, workers[i % len(workers)]) for i, family in enumerate(c.families)]
        self.clusters, self.windows, self.seed = clusters, c.validation_windows, seed
        self._reference = [self._log_goodput(cell, LaggedReference) for cell in self.cells]

    def __call__(self, policy: AdditivePolicy) -> float:
        logs = []
        for cell, reference in zip(self.cells, self._reference, strict=True):
            mine = self._log_goodput(cell, lambda _: AdditivePolicy(policy.net, without=policy.without))
            logs.append(float((mine - reference).mean()))
        return float(np.exp(np.mean(logs)))

    def _log_goodput(self, cell: tuple[str, int], make: Callable[[ClusterEnv], Policy]) -> Floats:
        clusters = sample_world(cell[0], self.clusters, cell[1], self.seed)
        env = ClusterEnv(clusters, seed=self.seed, lr_rule=lr_rule_of(cell[0]))
        seconds, progress = rollout_path(make(env), env, self.windows)[-1]
        return np.asarray(np.log(progress / seconds))


class _Seen:
    """Which inputs have varied, and the value of those that have not."""

    def __init__(self, inputs: int) -> None:
        self.least, self.most = torch.full((inputs,), torch.inf), torch.full((inputs,), -torch.inf)

    def add(self, observed: Tensor) -> None:
        flat = observed.flatten(0, -2)
        self.least, self.most = torch.minimum(self.least, flat.amin(0)), torch.maximum(self.most, flat.amax(0))

    def constant(self) -> tuple[Tensor, Tensor]:
        """Mask (F,) of inputs that never varied, and their values (0 if none was seen)."""
        return self.most <= self.least, torch.nan_to_num(self.least, posinf=0.0)
