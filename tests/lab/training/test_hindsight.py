"""Judging in hindsight: the figures are the simulator's own, gradients and credit point the right way."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix_lab.simulator import Clusters
from dynamix_lab.training.cloning import demonstrate
from dynamix_lab.training.curriculum import training_clusters
from dynamix_lab.training.hindsight import DecisionRecorder, Decisions, RecordingEnv


def _world(workers: int = 4) -> Clusters:
    clusters = training_clusters(12, workers, 5)
    return dataclasses.replace(clusters, change_cost_s=None, noise_unit=30 * clusters.noise_unit)


def _decisions(windows: int = 4) -> Decisions:
    return demonstrate(ResidualNet(), RecordingEnv(_world(), seed=3), windows=windows, seed=0, guided=None)


@pytest.mark.parametrize("sigma", [None, 0.8])
def test_hindsight_on_the_sizes_that_were_used_is_what_the_simulator_gave(sigma: float | None) -> None:
    """Also where samples cost unlike much."""
    unlike = None if sigma is None else np.full(12, sigma)
    env = RecordingEnv(dataclasses.replace(_world(), cost_sigma=unlike), seed=3, delay=0)
    policy, recorder, window = LearnedPolicy(), DecisionRecorder(env), env.reset()
    given, sizes = [], []
    for _ in range(5):
        observed = policy.observe(window, env.bounds)
        recorder.before(policy, window, observed, None)
        clock, progress = env.clock_s, env.progress
        zero = np.zeros(window.batch_size.shape)
        sizes.append(policy.allocate(window, env.bounds, zero, zero[..., 0]))
        window = env.step(sizes[-1])
        recorder.after()
        given.append(np.log((env.progress - progress) / (env.clock_s - clock)))
    hindsight = recorder.decisions().log_goodput(torch.from_numpy(np.concatenate(sizes)).float()).reshape(5, -1)
    apart = hindsight.numpy() - np.array(given)
    # The noise scale itself moves a little within a window.
    np.testing.assert_allclose(apart, 0.0, atol=0.02)


def test_many_samples_of_unlike_cost_vary_less_than_few() -> None:
    clusters = dataclasses.replace(_world(), cost_sigma=np.full(12, 1.0))
    decisions = demonstrate(ResidualNet(), RecordingEnv(clusters, seed=3), windows=4, seed=0, guided=None)
    unlike, alike = decisions, dataclasses.replace(decisions, sigma=torch.zeros_like(decisions.sigma))
    by_chance = [
        (unlike.busy(sizes) / alike.busy(sizes)).std().item() for sizes in (decisions.wish, 16 * decisions.wish)
    ]
    assert by_chance[1] < 0.6 * by_chance[0]


def test_a_small_step_along_the_gradient_gains_what_it_promises() -> None:
    decisions = _decisions()
    delta = torch.zeros_like(decisions.wish, requires_grad=True)
    growth = torch.zeros_like(decisions.base, requires_grad=True)
    before = decisions.log_goodput(decisions.sizes(delta, growth))
    before.sum().backward()
    step = 1e-3
    after = decisions.log_goodput(
        decisions.sizes((delta + step * delta.grad).detach(), (growth + step * growth.grad).detach())
    )
    gain = (after - before.detach()).mean()
    promised = step * (delta.grad.square().sum(-1) + growth.grad.square()).mean()
    assert 0 < gain < 1.2 * promised


def test_only_the_worker_that_keeps_the_others_waiting_is_blamed() -> None:
    decisions = _decisions()
    usual, growth = torch.zeros_like(decisions.wish), torch.zeros_like(decisions.base)
    slowest = decisions.busy(decisions.sizes(usual, growth)).mean(-1).argmax(-1)
    late = torch.nn.functional.one_hot(slowest, usual.shape[1]).float() * 0.2
    credit = decisions.credit(late, growth, usual)
    own = credit.gather(1, slowest[:, None])
    assert own.mean() < -0.02
    assert own.mean() < credit.mean() - 0.01
    assert decisions.credit(usual, growth, usual).abs().max() < 1e-5
