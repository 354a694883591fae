"""Rollouts of a student in the simulator, with or without a teacher at hand (DAgger, Ross et al. 2011)."""

from __future__ import annotations

import numpy as np
import torch

from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix.projection import project
from dynamix.simulator import ClusterEnv, HedgedReference, LaggedReference
from dynamix.training.hindsight import DecisionRecorder, Decisions, RecordingEnv
from dynamix.window import Floats, Ints, Window


class Teacher:
    """The clairvoyant references `lagged` and `hedged`; each cluster learns from the one that does better there."""

    def __init__(self, env: ClusterEnv) -> None:
        self.lagged, self.hedged = LaggedReference(env), HedgedReference(env, samples=8)

    def targets(self) -> tuple[Floats, Floats]:
        """Real sizes (C, W) of both."""
        return self.lagged.target(), self.hedged.target()

    @staticmethod
    def better(decisions: Decisions, other: torch.Tensor, clusters: int) -> torch.Tensor:
        """Targets (N, W): cluster by cluster `decisions.target` or `other`, by mean log goodput over the rollout."""
        gains = decisions.log_goodput(other) - decisions.log_goodput(decisions.target)
        wins = gains.reshape(-1, clusters).mean(0) > 0
        return torch.where(wins.repeat(len(other) // clusters)[:, None], other, decisions.target)


def demonstrate(net: ResidualNet, env: RecordingEnv, *, windows: int, seed: int, guided: float | None) -> Decisions:
    """One rollout: clusters follow the teacher with chance `guided`, else the student; None: no teacher, no labels."""
    rng, student = np.random.default_rng([seed, 1]), LearnedPolicy(net)
    teacher = None if guided is None else Teacher(env)
    follow = rng.random((env.clusters.shape[0], 1)) < (guided or 0.0)
    recorder, others = DecisionRecorder(env), []
    window = env.step(perturbed(env.reset().batch_size, env, rng, 0.3))
    for t in range(windows):
        observed = student.observe(window, env.bounds)
        lagged, hedged = (None, None) if teacher is None else teacher.targets()
        recorder.before(student, window, observed, lagged)
        sizes = _answer(student, window, env, observed, rng)
        if hedged is not None:
            others.append(hedged)
            sizes = np.where(follow, project(hedged, env.bounds), sizes)
        if t % 12 == 11:
            sizes = perturbed(sizes, env, rng, 0.15)
        window = env.step(sizes)
        recorder.after()
    decisions = recorder.decisions()
    if teacher is None:
        return decisions
    other = torch.from_numpy(np.concatenate(others).astype(np.float32))
    decisions.target.copy_(Teacher.better(decisions, other, env.clusters.shape[0]))
    return decisions


def _answer(
    student: LearnedPolicy, window: Window, env: ClusterEnv, observed: np.ndarray, rng: np.random.Generator
) -> Ints:
    """The student's allocation with a little noise, so that elasticities and mistakes are met on the way."""
    delta, growth = student.act(observed, window.batch_size > 0)
    noisy = rng.random(len(growth)) < 0.5
    delta = delta + 0.05 * noisy[:, None] * rng.normal(size=delta.shape)
    return student.allocate(window, env.bounds, delta, growth + 0.1 * noisy * rng.normal(size=growth.shape))


def perturbed(sizes: Ints, env: ClusterEnv, rng: np.random.Generator, sd: float) -> Ints:
    """Some clusters thrown off their allocation, so that coming back is learned too."""
    thrown = rng.random((len(sizes), 1)) < 0.5
    factor = np.exp(sd * rng.normal(size=sizes.shape) + 2 * sd * rng.normal(size=(len(sizes), 1)))
    return project(np.maximum(sizes * np.where(thrown, factor, 1.0), 1.0), env.bounds)
