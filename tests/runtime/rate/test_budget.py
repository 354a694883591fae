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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.rules import efficiency
from dynamix.runtime.state.packing import checksum
from dynamix_lab.simulator import sample_clusters
from dynamix_lab.virtual.cluster import VirtualCluster
from tests.lab.virtual.small import dataset, network
from tests.ranks import run_ranks
from tests.union import Script

SAMPLES = 96


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def controller(policy: Any = "static", **options: Any) -> tuple[dynamix.Controller, DataLoader[Any], Any]:
    made = dynamix.Controller(policy, 8, interval=2, **options)
    set_ = data()
    return made, DataLoader(set_, batch_sampler=made.batch_sampler(set_)), set_


def wrapped(job: dynamix.Controller) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    job.wrap(net, optimizer)
    return net, optimizer


def train(job: dynamix.Controller, loader: Any, budget: Any, net: Any, optimizer: Any, most: int = 1000) -> list[int]:
    """The loop of the documentation; epochs that it began."""
    epochs = []
    for epoch in budget:
        epochs.append(epoch)
        loader.batch_sampler.set_epoch(epoch)
        for x, y in loader:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            if job.stopping or job.samples_seen >= most:
                break
        if job.samples_seen >= most:
            break
    return epochs


def rates_used(job: dynamix.Controller, loader: Any, net: Any, optimizer: Any) -> list[float]:
    """In the steps of an epoch, after which the job is closed."""
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    train(job, loader, job.budget(epochs=1), net, optimizer)
    job.close()
    return used


def test_with_a_fixed_batch_epochs_of_a_budget_are_epochs() -> None:
    job, loader, _ = controller()
    net, optimizer = wrapped(job)
    budget = job.budget(epochs=3)
    assert train(job, loader, budget, net, optimizer) == [0, 1, 2]
    assert job.samples_seen == 3 * SAMPLES
    assert budget.part == 1.0
    assert budget.done
    job.close()


def test_a_budget_of_samples_ends_within_an_epoch_and_goes_on_after_a_resume() -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    job, loader, _ = controller()
    job.wrap(net, optimizer)
    assert train(job, loader, job.budget(136), net, optimizer, most=56) == [0]
    state = job.state_dict()
    job.close()
    job, loader, _ = controller()
    net, optimizer = wrapped(job)
    job.load_state_dict(state)
    budget = job.budget(136)
    assert budget.part == pytest.approx(56 / 136)
    assert train(job, loader, budget, net, optimizer) == [0, 1]
    assert job.samples_seen == 136
    job.close()


def test_a_loop_that_was_asked_to_stop_is_left_before_its_budget_is_spent() -> None:
    job, loader, _ = controller()
    net, optimizer = wrapped(job)
    budget = job.budget(epochs=3)
    job.request_stop()
    assert train(job, loader, budget, net, optimizer) == [0]
    assert job.samples_seen == 8
    assert not budget.done
    job.close()


def test_a_state_of_an_older_version_has_learned_what_it_trained() -> None:
    job, loader, _ = controller()
    net, optimizer = wrapped(job)
    train(job, loader, job.budget(48), net, optimizer)
    state = job.state_dict()
    job.close()
    del state["progress"]["learned"]
    state["checksum"] = checksum(state)
    job, *_ = controller()
    job.load_state_dict(state)
    assert job.budget(96).part == 0.5
    job.close()


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


def _ranks_stop(rank: int) -> tuple[list[int], int, float, bool]:
    torch.manual_seed(0)
    set_ = data(400)
    job = dynamix.Controller(Script([[16, 16], [24, 8]]), 8, interval=2, global_batch="adaptive")
    loader = DataLoader(set_, batch_sampler=job.batch_sampler(set_), num_workers=1 + rank)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = job.wrap(DDP(net), optimizer)
    budget = job.budget(600)
    epochs = train(job, loader, budget, model, optimizer)
    seen, spent = job.samples_seen, budget.spent
    job.close()
    return epochs, seen, spent, budget.done


def test_all_ranks_stop_after_the_same_step() -> None:
    first, second = run_ranks(_ranks_stop, 2)
    assert first == second
    assert first[3]
    assert first[1] > 600


def _budgets_differ(rank: int) -> str:
    job, loader, _ = controller()
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = job.wrap(DDP(net), optimizer)
    with pytest.raises(UsageError, match="budget") as refused:
        train(job, loader, job.budget(100 + rank), model, optimizer)
    return str(refused.value)


def test_budgets_that_differ_between_ranks_are_named() -> None:
    assert all("100" in said and "101" in said for said in run_ranks(_budgets_differ, 2))


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
    job, *_ = controller()
    with pytest.raises(ConfigError, match=f"^{names}="):
        job.budget(**given_)
    job.close()


def test_a_budget_needs_a_sampler_first_and_epochs_a_length() -> None:
    job = dynamix.Controller("static", 8)
    with pytest.raises(UsageError, match="sampler"):
        job.budget(10)
    job.stream(_endless())
    with pytest.raises(ConfigError, match="epochs"):
        job.budget(epochs=2)
    job.close()


class _Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.zeros(1) for _ in itertools.count())


def _endless() -> _Endless:
    return _Endless()


def test_an_epoch_that_trains_nothing_ends_the_budget_with_an_error() -> None:
    job, *_ = controller()
    with pytest.raises(UsageError, match="trained nothing"):
        for _ in job.budget(epochs=1):
            pass
    job.close()


# ---------------------------------------------------------------- the rate's own batch


@pytest.mark.parametrize(("batch", "factor"), [(None, 1.0), (8, 1.0), (4, 2.0), (16, 0.5)])
def test_the_rate_is_scaled_from_its_own_batch_also_where_the_batch_is_fixed(batch: Any, factor: float) -> None:
    job, loader, _ = controller(rate_for=batch, lr_rule="linear")
    net, optimizer = wrapped(job)
    used = rates_used(job, loader, net, optimizer)
    np.testing.assert_allclose(used, 0.1 * factor)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_while_nothing_is_known_of_the_noise_it_is_scaled_by_the_root() -> None:
    job, loader, _ = controller(rate_for=2)
    net, optimizer = wrapped(job)
    used = rates_used(job, loader, net, optimizer)
    np.testing.assert_allclose(used[:2], 0.2)
    assert len(set(used)) > 1  # the first window tells
    assert 0.1 <= min(used) <= max(used) <= 0.4


@pytest.mark.parametrize("rate_for", [0, -8, 2.5, True, "8"])
def test_a_batch_that_no_rate_is_for_is_refused(rate_for: Any) -> None:
    with pytest.raises(ConfigError, match="rate_for"):
        dynamix.Controller("static", 8, rate_for=rate_for)


def test_an_adaptive_batch_does_not_fall_below_what_was_given_unless_that_was_said() -> None:
    with Adaptive() as job:
        assert int(job.bounds.total_low) == 8
    with Adaptive(min_global_batch=2) as job:
        assert int(job.bounds.total_low) == 2
    with Adaptive(max_batch_size=8) as job:
        assert int(job.bounds.total_low) == 8


class Adaptive:
    """A controller of an adaptive batch of 8, closed in the end."""

    def __init__(self, **options: Any) -> None:
        self.job = dynamix.Controller("goodput", 8, global_batch="adaptive", **options)

    def __enter__(self) -> dynamix.Controller:
        return self.job

    def __exit__(self, *_: object) -> None:
        self.job.close()
