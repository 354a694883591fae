"""Rollouts of a student in the simulator, with or without a teacher (DAgger, Ross et al. 2011)."""

import numpy as np
import torch

from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix.projection import project
from dynamix.window import Ints
from dynamix_lab.simulator import ClusterEnv, HedgedReference, LaggedReference
from dynamix_lab.training.hindsight import DecisionRecorder, Decisions, RecordingEnv


def demonstrate(net: ResidualNet, env: RecordingEnv, *, windows: int, seed: int, guided: float | None) -> Decisions:
    """One rollout: clusters follow a teacher with probability `guided`, else the student; None: no teacher, no labels.

    Teachers are the references `lagged` and `hedged`; a cluster's label is from the one that did better there.
    """
    rng, student = np.random.default_rng([seed, 1]), LearnedPolicy(net)
    teachers = None if guided is None else (LaggedReference(env), HedgedReference(env, samples=8))
    follow = rng.random((env.clusters.shape[0], 1)) < (guided or 0.0)
    recorder, others = DecisionRecorder(env), []
    window = env.step(perturbed(env.reset().batch_size, env, rng, 0.3, 0.6))
    for t in range(windows):
        observed = student.observe(window, env.bounds)
        lagged, hedged = (None, None) if teachers is None else [teacher.target() for teacher in teachers]
        recorder.before(student, window, observed, lagged)
        # A little noise, so that rollouts include changes of size and mistakes.
        delta, growth = student.act(observed, window.batch_size > 0)
        noisy = rng.random(len(growth)) < 0.5
        delta = delta + 0.05 * noisy[:, None] * rng.normal(size=delta.shape)
        sizes = student.allocate(window, env.bounds, delta, growth + 0.1 * noisy * rng.normal(size=growth.shape))
        if hedged is not None:
            others.append(hedged)
            sizes = np.where(follow, project(hedged, env.bounds), sizes)
        if t % 12 == 11:
            sizes = perturbed(sizes, env, rng, 0.15, 0.3)
        window = env.step(sizes)
        recorder.after()
    decisions = recorder.decisions()
    if others:
        _take_better(decisions, torch.from_numpy(np.concatenate(others).astype(np.float32)), env.clusters.shape[0])
    return decisions


def _take_better(decisions: Decisions, other: torch.Tensor, clusters: int) -> None:
    """Replace, cluster by cluster, targets by `other` (N, W) if its log goodput is better on average."""
    gains = decisions.log_goodput(other) - decisions.log_goodput(decisions.target)
    wins = gains.reshape(-1, clusters).mean(0) > 0
    decisions.target.copy_(torch.where(wins.repeat(len(other) // clusters)[:, None], other, decisions.target))


def perturbed(sizes: Ints, env: ClusterEnv, rng: np.random.Generator, own_sd: float, shared_sd: float) -> Ints:
    """Perturb the allocation of half of the clusters, so that recovery is learned, too; deviations of log sizes."""
    thrown = rng.random((len(sizes), 1)) < 0.5
    factor = np.exp(own_sd * rng.normal(size=sizes.shape) + shared_sd * rng.normal(size=(len(sizes), 1)))
    return project(np.maximum(sizes * np.where(thrown, factor, 1.0), 1.0), env.bounds)
