"""Weighted gradients are the one big batch's, whatever the split and whichever side weights them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.union import Case, worst_error

pytestmark = pytest.mark.multiproc

SCRIPTS = {
    1: [[3], [7], [2]],
    2: [[2, 9], [7, 1], [5, 3]],
    3: [[1, 8, 3], [6, 2, 2], [4, 4, 9]],
    4: [[1, 2, 9, 4], [8, 2, 2, 3], [3, 3, 3, 3]],
    8: [[1, 2, 3, 4, 5, 6, 7, 1], [8, 1, 1, 1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_hook_side(workers: int) -> None:
    errors = run_ranks(worst_error, workers, Case(SCRIPTS[workers]), timeout_s=100)
    assert max(errors) < 1e-12


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_loss_side_with_tails(workers: int) -> None:
    case = Case(SCRIPTS[workers], weighting="loss", samples=203)
    # A NaN placeholder reaches the loss there too, so no tail may leave a rank without samples or be poisoned by it.
    assert max(run_ranks(worst_error, workers, case, timeout_s=100)) < 1e-12


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("weighting", ["hook", "loss"])
def test_accumulation(accumulate: int, weighting: str) -> None:
    case = Case(SCRIPTS[3], accumulate=accumulate, weighting=weighting, samples=211)
    assert max(run_ranks(worst_error, 3, case)) < 1e-12


def test_accumulation_without_dividing_the_loss_sums_micro_batches_as_plain_ddp_does() -> None:
    case = Case(SCRIPTS[2], accumulate=2, divide=False, samples=151)
    assert max(run_ranks(worst_error, 2, case)) < 1e-12


@pytest.mark.parametrize("weighting", ["hook", "loss"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_zero_shares_contribute_exactly_nothing(weighting: str, accumulate: int) -> None:
    script = [[0, 9, 4], [5, 0, 0], [0, 0, 7]]
    case = Case(script, min_batch_size=0, weighting=weighting, accumulate=accumulate, samples=251)
    assert max(run_ranks(worst_error, 3, case)) < 1e-12


@pytest.mark.parametrize("weighting", ["hook", "loss"])
def test_a_tail_whose_first_micro_batches_are_nobodys(weighting: str) -> None:
    # 56 samples in groups of 9, and caps of 2: one sample is over, and the micro-batches before it are placeholders
    # (NaN).
    case = Case([[2, 1]], batch_size=2, max_batch_size=2, accumulate=3, samples=56, weighting=weighting)
    assert max(run_ranks(worst_error, 2, case)) < 1e-12


def test_loader_workers() -> None:
    case = Case(SCRIPTS[2], num_workers=2, samples=300)
    assert max(run_ranks(worst_error, 2, case)) < 1e-12


def test_sparse_embeddings() -> None:
    assert max(run_ranks(worst_error, 2, Case(SCRIPTS[2], model="embedded"))) < 1e-12


@pytest.mark.parametrize("weighting", ["hook", "loss"])
@pytest.mark.parametrize("hook", [None, "fp16_compress"])
@pytest.mark.parametrize("model", ["headless", "checkpointed"])
def test_buckets_that_are_reduced_before_or_within_the_backward_pass(
    model: str, hook: str | None, weighting: str
) -> None:
    dtype, tolerance = (torch.float64, 1e-12) if hook is None else (torch.float32, 3e-3)
    ddp = {"find_unused_parameters": model == "headless"}
    case = Case(SCRIPTS[2], model=model, hook=hook, dtype=dtype, weighting=weighting, ddp=ddp)
    assert max(run_ranks(worst_error, 2, case)) < tolerance


@pytest.mark.parametrize("weighting", ["hook", "loss"])
@pytest.mark.parametrize(
    "options",
    [
        {"ddp": {"gradient_as_bucket_view": True}},
        {"ddp": {"find_unused_parameters": True}},
        {"ddp": {"static_graph": True}, "synchronised": 1},
        {"ddp": {"static_graph": True}, "warm_up": True},
    ],
    ids=lambda options: "-".join([*options["ddp"], *list(options)[1:]]),
)
def test_options_of_ddp_with_accumulation(options: dict[str, Any], weighting: str) -> None:
    case = Case(SCRIPTS[2], accumulate=2, weighting=weighting, samples=151, **options)
    assert max(run_ranks(worst_error, 2, case)) < 1e-12


def _refused(rank: int) -> str:
    try:
        worst_error(rank, Case(SCRIPTS[2], accumulate=2, ddp={"static_graph": True}))
    except UsageError as error:
        return str(error)
    return "accepted"


def test_static_graph_says_that_its_first_backward_must_synchronise() -> None:
    for message in run_ranks(_refused, 2):
        assert "static_graph=True" in message
        assert "warm_up" in message


def _static_after_wrap(rank: int) -> float:
    net = nn.Linear(2, 1, bias=False)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    controller = dynamix.Controller("static", 2, global_batch="adaptive")
    model = controller.wrap(DDP(net), optimizer)
    model._set_static_graph()
    data = TensorDataset(torch.ones(12, 2))
    for (x,) in DataLoader(data, batch_sampler=controller.batch_sampler(data)):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        controller.step()
    controller.close()
    assert net.weight.grad is not None
    return float(net.weight.grad.sum())


def test_a_graph_that_is_said_to_be_static_after_wrap() -> None:
    assert run_ranks(_static_after_wrap, 2, timeout_s=30) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("hook", "tolerance", "workers"),
    [
        *(("allreduce", 1e-6, workers) for workers in (2, 3, 4)),
        *(("powersgd", 1e-5, workers) for workers in (2, 4)),
        ("fp16_compress", 3e-3, 3),
        ("bf16_compress", 2e-2, 3),
    ],
)
def test_inner_hooks(hook: str, tolerance: float, workers: int) -> None:
    # PowerSGD at full rank is exact up to float32, so it shows that no bucket is mixed up with another.
    case = Case(SCRIPTS[workers], hook=hook, dtype=torch.float32, epochs=4)
    assert max(run_ranks(worst_error, workers, case)) < tolerance
