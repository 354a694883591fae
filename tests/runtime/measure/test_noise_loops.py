"""The noise scale of loops that reduce once, at every micro-batch, or twice in a batch, against brute force."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dynamix.runtime.measure.recorder import NORMS_EVERY
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, measured_noise, noise_of
from tests.union import Case, worst_error

SIZES = [9, 3, 6]
MEASURED = {True: 40, False: 2}  # steps that are measured: many where a statistical bound is asked, else few
# name -> (micro-batches a step, whether no_sync is used, how many losses a batch has, the size of pieces)
LOOPS = {
    "plain": (1, True, 1, None),
    "pieces": (1, True, 1, 4),
    "no_sync": (3, True, 1, None),
    "synchronised": (3, False, 1, None),
    "two losses": (1, True, 2, None),
    "two losses, no_sync": (3, True, 2, None),
    "two updates": (1, True, 1, None),
}


def _gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(F.mse_loss(net(x), y), list(net.parameters()))])


def _measured(rank: int, loop: str, weighting: str, found: list[tuple[float, float]]) -> tuple[float, float]:
    """Noise scale over all windows of a job as it measures it (`found`), and from each rank's whole gradient."""
    accumulate, no_sync, losses, micro_batch = LOOPS[loop]
    steps = MEASURED[loop == "synchronised"] * NORMS_EVERY
    torch.manual_seed(0)
    x = torch.randn(steps * accumulate * sum(SIZES), 16, dtype=torch.float64)
    y = 0.25 * x[:, :8] + torch.randn(len(x), 8, dtype=torch.float64)
    net = nn.Linear(16, 8).double()
    dealt = {"accumulate": accumulate, "micro_batch": micro_batch, "min_batch_size": SIZES, "max_batch_size": SIZES}
    controller = adaptive("static", 6, interval=2 * NORMS_EVERY, **dealt)
    job = Training(controller, TensorDataset(x, y), net, lr=1e-3, ddp={"bucket_cap_mb": 2e-4}, weighting=weighting)
    true: list[tuple[float, float]] = []
    batches: list[list[Tensor]] = []
    for inputs, target in job.loader:
        batches.append([inputs, target])
        due = controller.optimizer_due
        own = _gradient(net, *(torch.cat(values) for values in zip(*batches, strict=True)))
        with controller.piece() if micro_batch else contextlib.nullcontext():
            factor = controller.weight(torch.ones(())) if weighting == "loss" else 1.0
            for i, part in enumerate(_halves(losses)):
                alone = not micro_batch and ((no_sync and not due) or i < losses - 1)
                with job.model.no_sync() if alone else contextlib.nullcontext():
                    loss = F.mse_loss(job.model(inputs)[:, part], target[:, part]) / losses
                    (loss / accumulate * factor).backward()
        if due:
            if controller.metrics()["step"] % NORMS_EVERY == 0:
                true.append(noise_of(own, accumulate * np.array(SIZES)))
            batches = []
        if loop == "two updates":
            job.update()
            (F.mse_loss(job.model(inputs), target) * factor).backward()
        job.finish(loss=loss)
    controller.close()
    if rank:
        return 1.0, 1.0
    measured, exact = (np.mean(pairs, axis=0) for pairs in (found, true))
    return float(measured[0] / measured[1]), float(exact[0] / exact[1])


def _halves(losses: int) -> list[slice]:
    return [slice(0, 4), slice(4, 8)] if losses == 2 else [slice(None)]


def _all_loops(rank: int) -> dict[str, Any]:
    told = {}
    for loop, side in itertools.product(LOOPS, ("hook", "loss")):
        if (loop, side) == ("synchronised", "loss"):
            continue  # long, and its gradients are those of "no_sync"
        with measured_noise() as found:
            told[f"{loop}, {side}"] = _measured(rank, loop, side, found)
    return told


@pytest.mark.multiproc
def test_the_noise_scale_of_every_allowed_loop_is_that_of_the_ranks_whole_gradients() -> None:
    results = run_ranks(_all_loops, len(SIZES), timeout_s=120)[0]
    for case, (measured, exact) in results.items():
        bound = 0.1 if "synchronised" in case else 1e-6  # else the gradients compared are the same ones
        assert measured == pytest.approx(exact, rel=bound), (case, results)


def _tails(rank: int) -> list[float]:
    given: dict[str, Any] = {"accumulate": 3, "min_batch_size": 0, "synchronised": 10**6}
    return [worst_error(rank, Case([[6, 2], [3, 9], [5, 0]], samples=samples, **given)) for samples in (103, 150)]


@pytest.mark.multiproc
def test_gradients_stay_the_unions_where_every_micro_batch_is_reduced_and_a_tail_is_uneven() -> None:
    for errors in run_ranks(_tails, 2):
        assert max(errors) < 1e-12, errors
