"""Runs of `bench tta` predicted: on a model of the training, or by the training itself with only its seconds
simulated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dynamix.policies import make_policy
from dynamix.policies.protocol import boundary
from dynamix.window import Bounds
from dynamix_lab.emulator import load_scenario
from dynamix_lab.harness.launch import LaunchSettings
from dynamix_lab.harness.processes import in_processes
from dynamix_lab.harness.reference import references
from dynamix_lab.simulator import rollout
from dynamix_lab.statistics import time_to_target
from dynamix_lab.suites.fidelity.live_costs import LiveCosts
from dynamix_lab.suites.fidelity.scenario_env import LONGEST_S, scenario_world
from dynamix_lab.tasks import Data, as_is, make_workload, score
from dynamix_lab.virtual.cluster import VirtualCluster
from dynamix_lab.virtual.run import Snapshot


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """A run to predict: of `policy` on a scenario, with the data, weights and disturbances of `seed`."""

    scenario: str
    policy: str
    seed: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """Mean step and time to the target, s (`LONGEST_S` where a run would take longer), and how many steps it took."""

    step_s: float
    time_to_target_s: float
    steps: int


def predict(job: PredictedRun, costs: LiveCosts) -> Predicted:
    """On a model: progress by AdaScale's count, the noise scale as runs of a fixed global batch had it, a fixed
    progress to the target.
    """
    settings, scenario = LaunchSettings(), load_scenario(job.scenario)
    base = settings.batch_size * scenario.workers
    per_epoch = boundary(make_policy(job.policy, others=references(scenario))) == "epoch"
    interval, delay = (settings.train_samples() // base, 0) if per_epoch else (settings.interval, 1)
    env, policy = scenario_world(scenario, job.policy, job.seed, costs, interval=interval, delay=delay)
    needed = costs.needed * costs.units(float(base))
    for _ in rollout(policy, env):
        if env.progress[0] >= needed or env.clock_s[0] >= LONGEST_S:
            break
    seconds, share = float(env.clock_s[0]), needed / float(env.progress[0])
    return Predicted(seconds / env.steps, seconds * min(share, 1.0), env.steps)


def train(job: PredictedRun, costs: LiveCosts, settings: LaunchSettings | None = None) -> Predicted:
    """By the training of that seed on the virtual clock, some 50 s of a core: losses, noise scale and accuracy are a
    live run's with the same allocations, within float error, and only seconds are simulated. Answers that a live run
    had too late are not."""
    settings, scenario = settings or LaunchSettings(), load_scenario(job.scenario)
    workload = make_workload(settings.workload)
    data = _data(job.seed, settings)
    env, policy = scenario_world(scenario, job.policy, job.seed, costs, interval=1, delay=1)
    env.clock_s = np.zeros(1)  # making a world measures a step
    bounds = Bounds.of(scenario.workers, workload.min_batch, workload.max_batch)
    model = workload.make_model(job.seed)
    target, seen = settings.target(workload), list[Snapshot]()

    def ended(now: Snapshot) -> bool:
        seen.append(now)
        # A live run hears of the second score above the target at the next snapshot, and ends at the one after that.
        return _reached(seen[:-2], target) is not None or now.time_s > LONGEST_S

    with VirtualCluster(
        model,
        workload.make_optimizer(model.parameters()),
        workload.loss,
        data.train,
        clusters=env,
        policy=policy,
        batch_size=settings.batch_size,
        bounds=bounds,
        interval=settings.interval,
        lr_rule=settings.lr_rule,
        seed=job.seed,
        collate_fn=as_is,
    ) as cluster:
        run = cluster.run(
            settings.max_steps(),
            snapshot_samples=settings.snapshot_samples(),
            score=lambda net: score(workload, net, data.test),
            until=ended,
        )
    return Predicted(float(run.step_s.mean()), _reached(seen, target) or LONGEST_S, len(run.step_s))


def _reached(seen: Sequence[Snapshot], target: float) -> float | None:
    return time_to_target([s.time_s for s in seen], [s.score for s in seen], target)


def predict_all(
    jobs: Sequence[PredictedRun],
    costs: LiveCosts,
    *,
    trained: bool,
    tell: Callable[[str, float], None],
    settings: LaunchSettings | None = None,
) -> dict[PredictedRun, Predicted]:
    """Every job's prediction; trainings run beside each other, one to a core.

    tell      called with what was done, and which part of the whole
    settings  of trainings; None: those of `bench tta`
    """
    if not trained:
        return {job: predict(job, costs) for job in jobs}
    for seed in sorted({job.seed for job in jobs}):
        _data(seed, settings or LaunchSettings())  # made once, here; the processes read it from the cache
    done: dict[PredictedRun, Predicted] = {}
    cores = len(os.sched_getaffinity(0))
    wanted = {job: (job, costs, settings) for job in jobs}
    for job, found in in_processes(train, wanted, cores):
        done[job] = found
        tell(f"{job.scenario} {job.policy} seed {job.seed}", len(done) / len(wanted))
    return {job: done[job] for job in wanted}


def _data(seed: int, settings: LaunchSettings) -> Data:
    workload = make_workload(settings.workload)
    return workload.make_data(seed, train=settings.train_samples(), test=settings.test_samples())
