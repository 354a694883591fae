"""Weighted gradients are the one big batch's, whatever the split and whichever side weights them."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("workers", [2, 4])
def test_loss_side_with_tails(workers: int) -> None:
    case = Case(SCRIPTS[workers], weighting="loss", samples=203)
    # A NaN placeholder reaches the loss there too, so no tail may leave a rank without samples or be poisoned by it.
    assert max(run_ranks(worst_error, workers, case)) < 1e-12


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("weighting", ["hook", "loss"])
def test_accumulation(accumulate: int, weighting: str) -> None:
    case = Case(SCRIPTS[3], accumulate=accumulate, weighting=weighting, samples=211)
    assert max(run_ranks(worst_error, 3, case)) < 1e-12


def test_accumulation_without_dividing_the_loss_sums_micro_batches_as_plain_ddp_does() -> None:
    case = Case(SCRIPTS[2], accumulate=2, divide=False, samples=151)
    assert max(run_ranks(worst_error, 2, case)) < 1e-12


def test_zero_shares_contribute_exactly_nothing() -> None:
    case = Case([[0, 9, 4], [5, 0, 0], [0, 0, 7]], min_batch_size=0)
    assert max(run_ranks(worst_error, 3, case)) < 1e-12


def test_loader_workers() -> None:
    case = Case(SCRIPTS[2], num_workers=2, samples=300)
    assert max(run_ranks(worst_error, 2, case)) < 1e-12


def test_sparse_embeddings() -> None:
    assert max(run_ranks(worst_error, 2, Case(SCRIPTS[2], model="embedded"))) < 1e-12


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [("allreduce", 1e-6), ("fp16_compress", 3e-3), ("bf16_compress", 2e-2), ("powersgd", 1e-5)],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_inner_hooks(hook: str, tolerance: float, workers: int) -> None:
    # PowerSGD at full rank is exact up to float32, so it shows that no bucket is mixed up with another.
    case = Case(SCRIPTS[workers], hook=hook, dtype=torch.float32, epochs=4)
    assert max(run_ranks(worst_error, workers, case)) < tolerance
