"""Learning the `dynamix` policy in the simulator: clone the lagged reference (DAgger), then PPO on regret."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamix.learning.evaluation import evaluate
from dynamix.learning.ppo import PPO, Act, PPOConfig, Rollout
from dynamix.policies.learned import DELTA_LIMIT, GROWTH_LIMIT, TRUST, LearnedPolicy, ResidualNet, read_description
from dynamix.policies.proportional import fill_unknown
from dynamix.simulator import ClusterEnv, LaggedReference, sample_clusters
from dynamix.window import Floats, Ints, Window, project

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The recipe. Seeds of training clusters are derived from `seed`; validation and test seeds never meet them."""

    workers: tuple[int, ...] = (2, 4, 8, 16, 32)
    rows: int = 256  # clusters * W per environment
    intervals: tuple[int, ...] = (5, 5, 10)
    delays: tuple[int, ...] = (1, 1, 4)
    clone_rounds: int = 10
    clone_windows: int = 40
    clone_epochs: int = 2
    clone_keep: int = 4  # rounds of data kept
    clone_rate: float = 2e-3
    ppo_updates: int = 40
    ppo_windows: int = 24
    ppo_rate: float = 2e-4
    gamma: float = 0.5  # a decision's effect is over within a few windows
    anchor_weight: float = 0.002
    validate_every: int = 5
    validation_clusters: int = 32  # for each W
    validation_windows: int = 60
    hidden: int = 64


VALIDATION_SEEDS, TEST_SEEDS = (900_001,), (990_001, 990_002)


def train(config: TrainingConfig | None = None, seed: int = 0, *, progress: Progress | None = None) -> LearnedPolicy:
    """A policy from nothing: minutes on 2 cores; the same config and seed give the same weights.

    `progress(what, fraction done)` is called now and then. The checkpoint kept is the best on validation clusters.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums, hence the weights, must not depend on the machine's cores
    try:
        return _train(config or TrainingConfig(), seed, progress or (lambda what, fraction: None))
    finally:
        torch.set_num_threads(threads)


def _train(c: TrainingConfig, seed: int, tell: Progress) -> LearnedPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ResidualNet(hidden=c.hidden)
    _clone(net, c, seed, tell)
    best, best_score = copy.deepcopy(net), _score(net, c)
    tell(f"cloned: {best_score:.4f}", 0.5)
    scores = [round(best_score, 4)]
    if c.ppo_updates:
        ppo_config = PPOConfig(
            c.ppo_rate, c.gamma, 0.9, 0.1, epochs=3, minibatch=256, anchor_weight=c.anchor_weight, max_gradient_norm=1.0
        )
        with torch.no_grad():
            net.log_std_local.fill_(-3.2)
            net.log_std_shared.fill_(-3.2)
        ppo = PPO(net, ppo_config, seed=seed)
        ppo.anchor = copy.deepcopy(net)
        for i in range(c.ppo_updates):
            ppo.update([_rollout(ppo, c, w, seed * 100_000 + 50_000 + 100 * i + w) for w in c.workers])
            if (i + 1) % c.validate_every == 0:
                scores.append(round(score := _score(net, c), 4))
                if score > best_score:
                    best, best_score = copy.deepcopy(net), score
                tell(f"PPO {i + 1}: {score:.4f}", 0.5 + 0.5 * (i + 1) / c.ppo_updates)
    return LearnedPolicy(
        best, about={"training": dataclasses.asdict(c), "seed": seed, "validation": scores, "trust": TRUST}
    )


def train_and_save(
    path: str | Path, config: TrainingConfig | None = None, seed: int = 0, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Train, evaluate on the test seeds (never used before), write the policy file; returns its description."""
    policy = train(config, seed, progress=progress)
    figures = evaluate({"dynamix": lambda _: LearnedPolicy(policy.net, about=policy.about)}, TEST_SEEDS)
    policy.about["evaluation"] = {"seeds": list(TEST_SEEDS), "time_of_lagged_reference_over_time": figures}
    policy.save(path)
    return show(path)


def show(path: str | Path) -> dict[str, Any]:
    """What a policy file says about itself. Raises `PolicyFileError` when it is not a valid policy."""
    LearnedPolicy.load(path)
    return read_description(path)


def _score(net: ResidualNet, config: TrainingConfig) -> float:
    """On validation clusters: mean over W of the geometric mean and the worst decile."""
    clusters, windows = config.validation_clusters, config.validation_windows
    figures = evaluate({"it": lambda _: LearnedPolicy(net)}, VALIDATION_SEEDS, clusters=clusters, windows=windows)
    return float(np.mean([0.5 * (f["it"]["geometric_mean"] + f["it"]["worst_decile"]) for f in figures.values()]))


def _env(config: TrainingConfig, workers: int, seed: int) -> ClusterEnv:
    pick = np.random.default_rng(seed)
    clusters = sample_clusters(max(config.rows // workers, 4), workers, seed)
    interval, delay = int(pick.choice(config.intervals)), int(pick.choice(config.delays))
    return ClusterEnv(clusters, seed=seed, interval=interval, delay=delay)


def _perturbed(sizes: Ints, env: ClusterEnv, rng: np.random.Generator, sd: float) -> Ints:
    """Some clusters thrown off their allocation, so that coming back is learned too."""
    thrown = rng.random((len(sizes), 1)) < 0.5
    factor = np.exp(sd * rng.normal(size=sizes.shape) + 2 * sd * rng.normal(size=(len(sizes), 1)))
    return project(np.maximum(sizes * np.where(thrown, factor, 1.0), 1.0), env.bounds)


# ---------------------------------------------------------------- cloning


def _label(policy: LearnedPolicy, window: Window, target: Floats) -> tuple[Floats, Floats]:
    """The action (delta, g) that would give the teacher's real sizes `target`."""
    delta = np.log(target) - np.log(fill_unknown(policy.memory.speed))
    delta = delta - delta.mean(-1, keepdims=True)
    growth = np.log(target.sum(-1) / window.global_batch)
    return np.clip(delta, -DELTA_LIMIT, DELTA_LIMIT), np.clip(growth, -GROWTH_LIMIT, GROWTH_LIMIT)


def _demonstrate(
    net: ResidualNet, config: TrainingConfig, workers: int, seed: int, guided: float
) -> dict[str, torch.Tensor]:
    """One DAgger rollout: clusters follow the teacher with probability `guided`, else the student; all are labelled."""
    env, rng = _env(config, workers, seed), np.random.default_rng([seed, 1])
    teacher, student, window = LaggedReference(env), LearnedPolicy(net), env.reset()
    follow = rng.random((env.clusters.shape[0], 1)) < guided
    seen: list[tuple[Any, Any, Any]] = []
    window = env.step(_perturbed(window.batch_size, env, rng, 0.3))
    for t in range(config.clone_windows):
        observed, target = student.observe(window), teacher.target()
        seen.append((observed, *_label(student, window, target)))
        sizes = student.allocate(window, env.bounds, *student.act(observed, window.batch_size > 0))
        sizes = np.where(follow, project(target, env.bounds), sizes)
        if t % 12 == 11:
            sizes = _perturbed(sizes, env, rng, 0.15)
        window = env.step(sizes)
    observed, delta, growth = (np.concatenate(part).astype(np.float32) for part in zip(*seen, strict=True))
    return {name: torch.from_numpy(a) for name, a in (("observed", observed), ("delta", delta), ("growth", growth))}


def _clone(net: ResidualNet, config: TrainingConfig, seed: int, tell: Progress) -> None:
    """DAgger (Ross et al. 2011) from the lagged reference: mean squared error in log sizes."""
    optimizer = torch.optim.Adam(net.parameters(), lr=config.clone_rate)
    generator = torch.Generator().manual_seed(seed)
    data: list[dict[str, torch.Tensor]] = []
    for i in range(config.clone_rounds):
        for group in optimizer.param_groups:
            group["lr"] = config.clone_rate * (1 - 0.95 * i / config.clone_rounds)
        guided = 0.5**i
        data += [_demonstrate(net, config, w, seed * 100_000 + 100 * i + w, guided) for w in config.workers]
        data = data[-config.clone_keep * len(config.workers) :]
        losses = [_fit(net, optimizer, data, generator) for _ in range(config.clone_epochs)]
        tell(f"clone {i + 1}: loss {losses[-1]:.5f}", 0.5 * (i + 1) / config.clone_rounds)


def _fit(net: ResidualNet, optimizer: Any, data: list[dict[str, torch.Tensor]], generator: torch.Generator) -> float:
    work = []
    for part in data:
        rows = max(1024 // part["delta"].shape[-1], 16)
        order = torch.randperm(len(part["growth"]), generator=generator)
        work += [(part, chunk) for chunk in order.split(rows)]
    total = 0.0
    for i in torch.randperm(len(work), generator=generator).tolist():
        part, rows_at = work[i]
        observed, delta, growth = part["observed"][rows_at], part["delta"][rows_at], part["growth"][rows_at]
        local, shared, _ = net(observed, torch.ones(delta.shape, dtype=torch.bool))
        local = local.squeeze(-1)
        error = local - local.mean(-1, keepdim=True) - delta
        # Huber: a slowdown that nobody could have seen must not outweigh all that can be learned. An equal error in g
        # costs less time than in delta, where the slowest worker sets the pace.
        loss = torch.nn.functional.huber_loss(error, torch.zeros_like(error), delta=0.3)
        loss = loss + 0.3 * torch.nn.functional.huber_loss(shared.squeeze(-1), growth, delta=0.3)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        total += float(loss.detach())
    return total / len(work)


# ---------------------------------------------------------------- PPO


def _rollout(ppo: PPO, config: TrainingConfig, workers: int, seed: int) -> Rollout:
    """Decisions and their regret: log goodput of the window less the lagged reference's in the same world."""
    env, other = _env(config, workers, seed), _env(config, workers, seed)
    assert isinstance(ppo.net, ResidualNet)
    policy, teacher = LearnedPolicy(ppo.net), LaggedReference(other)
    window, reference = env.reset(), other.reset()
    acts: list[tuple[torch.Tensor, torch.Tensor, Act]] = []
    rewards = []
    for _ in range(config.ppo_windows):
        observed, mask = torch.from_numpy(policy.observe(window)), torch.from_numpy(window.batch_size > 0)
        act = ppo.act(observed, mask)
        delta, growth = act.local.squeeze(-1).double().numpy(), act.shared.squeeze(-1).double().numpy()
        acts.append((observed, mask, act))
        before = _marks(env), _marks(other)
        window = env.step(policy.allocate(window, env.bounds, delta, growth))
        reference = other.step(teacher.decide(reference, other.bounds))
        rewards.append(_log_goodput(env, before[0]) - _log_goodput(other, before[1]))
    last = ppo.value(torch.from_numpy(policy.observe(window)), torch.from_numpy(window.batch_size > 0))
    reward = torch.from_numpy(np.clip(np.array(rewards), -2, 2)).float() * 5
    return Rollout.of(acts, last, reward, torch.zeros(reward.shape, dtype=torch.bool))


def _marks(env: ClusterEnv) -> tuple[Floats, Floats]:
    return env.clock_s, env.progress


def _log_goodput(env: ClusterEnv, before: tuple[Floats, Floats]) -> Floats:
    return np.asarray(np.log((env.progress - before[1]) / (env.clock_s - before[0])))
