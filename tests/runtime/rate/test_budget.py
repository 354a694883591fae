"""A budget: what so many samples teach at the start, which a larger batch needs more samples for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.rules import efficiency
from dynamix.runtime.state.packing import checksum
from dynamix_lab.simulator import sample_clusters
from dynamix_lab.virtual.cluster import VirtualCluster
from tests.lab.virtual.small import dataset, network
from tests.ranks import refusal, run_ranks
from tests.refused import refused
from tests.runtime.jobs import Training, classes
from tests.union import Script

SAMPLES = 96


def job_of(policy: Any = "static", samples: int = SAMPLES, num_workers: int = 0, **options: Any) -> Training:
    controller = dynamix.Controller(policy, 8, interval=2, **options)
    return Training(controller, classes(samples), num_workers=num_workers)


def train(job: Training, budget: Any, most: int = 1000) -> list[int]:
    """The loop of the documentation; epochs that it began."""
    epochs, controller = [], job.controller
    for epoch in budget:
        epochs.append(epoch)
        job.sampler.set_epoch(epoch)
        for x, y in job.loader:
            job.backward(x, y)
            job.finish()
            if controller.stopping or controller.samples_seen >= most:
                break
        if controller.samples_seen >= most:
            break
    return epochs


def rates_used(job: Training) -> list[float]:
    """In the steps of an epoch, after which the job is closed."""
    used: list[float] = []
    job.optimizer.register_step_pre_hook(lambda *_: used.append(job.optimizer.param_groups[0]["lr"]))
    train(job, job.controller.budget(epochs=1))
    job.controller.close()
    return used


def test_with_a_fixed_batch_epochs_of_a_budget_are_epochs() -> None:
    job = job_of()
    budget = job.controller.budget(epochs=3)
    assert train(job, budget) == [0, 1, 2]
    assert job.controller.samples_seen == 3 * SAMPLES
    assert budget.spent >= budget.samples
    assert budget.done
    job.controller.close()


@pytest.mark.parametrize("older", [False, True])
def test_a_budget_of_samples_ends_within_an_epoch_and_goes_on_after_a_resume(older: bool) -> None:
    job = job_of()
    assert train(job, job.controller.budget(136), most=56) == [0]
    state = job.controller.state_dict()
    job.controller.close()
    if older:  # of a version that did not count what was learned
        del state["progress"]["learned"]
        state["checksum"] = checksum(state)
    job = job_of()
    job.controller.load_state_dict(state)
    budget = job.controller.budget(136)
    assert budget.spent == 56
    assert train(job, budget) == [0, 1]
    assert job.controller.samples_seen == 136
    job.controller.close()


@pytest.mark.filterwarnings("ignore:the loaded state goes on with a global batch:RuntimeWarning")
@pytest.mark.parametrize("first", [False, True], ids=["loaded after the schedule", "loaded first"])
def test_a_schedule_reaches_its_end_in_a_script_that_asks_for_another_batch(first: bool) -> None:
    def made(batch: int, state: Any = None) -> tuple[Training, Any]:
        job = Training(dynamix.Controller("static", batch), classes(SAMPLES))
        if first and state:
            job.controller.load_state_dict(state)
        steps = 2 * SAMPLES // job.controller.base_batch
        schedule = job.controller.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, steps))
        if not first and state:
            job.controller.load_state_dict(state)
        return job, schedule

    job, _ = made(8)
    train(job, job.controller.budget(epochs=1))
    state = job.controller.state_dict()
    job, schedule = made(4, state)
    rate = job.optimizer.param_groups[0]["initial_lr"]
    assert schedule.get_last_lr() == pytest.approx([rate / 2])
    train(job, job.controller.budget(epochs=2))
    assert schedule.get_last_lr() == pytest.approx([0.0], abs=1e-9)
    assert schedule.scheduler.last_epoch == 24


def test_a_loop_that_was_asked_to_stop_is_left_before_its_budget_is_spent() -> None:
    job = job_of()
    budget = job.controller.budget(epochs=3)
    job.controller.request_stop()
    assert train(job, budget) == [0]
    assert job.controller.samples_seen == 8
    assert not budget.done
    job.controller.close()


def virtual(policy: Any, **options: Any) -> VirtualCluster:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    usual = {"clusters": sample_clusters(1, 4, seed=3), "batch_size": 8, "interval": 3, "seed": 4, "policy": policy}
    return VirtualCluster(net, optimizer, F.cross_entropy, dataset(350), **{**usual, **options})


def test_a_batch_that_grows_trains_on_more_samples_to_the_same_end_of_a_schedule() -> None:
    with virtual(Script([[32, 32, 32, 32]])) as cluster:
        schedule = cluster.scheduler(torch.optim.lr_scheduler.LinearLR(cluster.optimizer, 1.0, 0.0, total_iters=50))
        budget = cluster.budget(50 * 32)
        while not budget.done:
            cluster.run(1)
        assert schedule.scheduler.last_epoch == 50
        assert cluster.samples_seen > 1.2 * budget.samples


def test_counted_by_samples_a_budget_is_samples() -> None:
    with virtual(Script([[32, 32, 32, 32]])) as cluster:
        budget = cluster.budget(1600, count="samples")
        while not budget.done:
            cluster.run(1)
        assert 1600 <= cluster.samples_seen < 1600 + 128


@given(st.floats(0.0, 1e6), st.floats(1e-6, 1e6), st.floats(1.0, 64.0))
def test_a_sample_of_a_larger_batch_teaches_less_and_its_step_more(noise: float, signal: float, scale: float) -> None:
    each = efficiency(32 * scale, 32, noise, signal)
    assert 1 / scale <= each * (1 + 1e-9)
    assert each <= 1 + 1e-9
    assert efficiency(32 * scale, 32, math.nan, math.nan) == 1.0


# ---------------------------------------------------------------- of several ranks


def _ranks(rank: int) -> tuple[Any, str]:
    """What a budget of several ranks comes to, and what those are told whose budgets differ."""
    job = job_of(Script([[16, 16], [24, 8]]), 400, num_workers=1 + rank, global_batch="adaptive")
    budget = job.controller.budget(600)
    told = train(job, budget), job.controller.samples_seen, budget.spent, budget.done
    job.controller.close()
    job = job_of()
    return told, refusal(UsageError, train, job, job.controller.budget(100 + rank))


@pytest.mark.multiproc
def test_all_ranks_stop_after_the_same_step_and_budgets_that_differ_are_named() -> None:
    (first, said), (second, other) = run_ranks(_ranks, 2)
    assert first == second
    _, seen, _, done = first
    assert done
    assert seen > 600
    for words in ("budget", "100", "101"):
        assert words in said
        assert words in other


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given_", "names"),
    [
        ({}, "samples, epochs"),
        ({"samples": 0}, "samples"),
        ({"samples": 1.5}, "samples"),
        ({"epochs": 0}, "epochs"),
        ({"samples": 10, "epochs": 1}, "samples"),
        ({"samples": 10, "count": "steps"}, "count"),
    ],
    ids=str,
)
def test_an_impossible_budget_is_refused(given_: dict[str, Any], names: str) -> None:
    refused(ConfigError, f"^{names}=", job_of().controller.budget, **given_)


def test_a_budget_needs_a_sampler_first_and_epochs_a_length() -> None:
    controller = dynamix.Controller("static", 8)
    refused(UsageError, "sampler", controller.budget, 10)
    controller.stream(_Endless())
    refused(ConfigError, "epochs", controller.budget, epochs=2)
    controller.close()


class _Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.zeros(1) for _ in itertools.count())


def test_an_epoch_that_trains_nothing_ends_the_budget_with_an_error() -> None:
    refused(UsageError, "trained nothing", list, job_of().controller.budget(epochs=1))


# ---------------------------------------------------------------- the rate's own batch


@pytest.mark.parametrize(("batch", "factor"), [(None, 1.0), (4, 2.0), (16, 0.5)])
def test_the_rate_is_scaled_from_its_own_batch_also_where_the_batch_is_fixed(batch: Any, factor: float) -> None:
    job = job_of(rate_for=batch, lr_rule="linear")
    np.testing.assert_allclose(rates_used(job), 0.1 * factor)
    assert job.optimizer.param_groups[0]["lr"] == 0.1


def test_while_nothing_is_known_of_the_noise_it_is_scaled_by_the_root() -> None:
    used = rates_used(job_of(rate_for=2))
    np.testing.assert_allclose(used[:2], 0.2)
    assert len(set(used)) > 1  # the first window tells
    assert 0.1 <= min(used) <= max(used) <= 0.4


@pytest.mark.parametrize(("options", "least"), [({}, 8), ({"min_global_batch": 2}, 2), ({"max_batch_size": 8}, 8)])
def test_an_adaptive_batch_does_not_fall_below_what_was_given_unless_that_was_said(
    options: dict[str, Any], least: int
) -> None:
    assert int(dynamix.Controller("goodput", 8, global_batch="adaptive", **options).bounds.total_low) == least
