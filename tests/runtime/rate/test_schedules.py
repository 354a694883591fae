"""Schedules while the global batch moves: those that count steps are noticed, those by samples keep their meaning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import dynamix
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script

SAMPLES, EPOCHS = 240, 3
MOVING = [[8], [16], [12], [24]]
Each = Callable[[], object]


def _train(
    make: Callable[[dynamix.Controller, torch.optim.Optimizer], tuple[Each, Each]],
    script: list[list[int]] = MOVING,
    *,
    lr: Any = 0.1,
    first: bool = False,
    **options: Any,
) -> tuple[list[str], list[float]]:
    """What a job warned of, and its learning rate after each step. `make` gives what is called after a step and after
    an epoch; `first`: after the optimizer's step rather than the controller's.
    """
    job = Training(adaptive(Script(script), **options), classes(SAMPLES), lr=lr)
    after_step, after_epoch = make(job.controller, job.optimizer)
    rates = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(EPOCHS):
            for x, y in job.loader:
                job.backward(x, y)
                job.update()
                if first:
                    after_step()
                job.controller.step()
                if not first:
                    after_step()
                rates.append(float(job.optimizer.param_groups[0]["lr"]))
            after_epoch()
    job.controller.close()
    assert len(job.controller.batch_sizes) == 1
    return [str(w.message) for w in caught], rates


def _nothing() -> None:
    """Nothing is called."""


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 90),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=200),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.01, total_iters=40),
    "stairs": lambda o: lr_scheduler.StepLR(o, 5),
    "both": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.99)], milestones=[5]
    ),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_counts_steps_is_warned_of_once_with_the_line_to_write(name: str, first: bool) -> None:
    said, _ = _train(lambda _, o: (SCHEDULERS[name](o).step, _nothing), first=first)
    assert len(said) == 1, said
    assert "scheduler = controller.scheduler(scheduler)" in said[0]
    assert "8 at the start" in said[0]


@pytest.mark.parametrize("first", [True, False])
def test_so_is_one_that_was_given_and_is_stepped_all_the_same(first: bool) -> None:
    def make(controller: dynamix.Controller, optimizer: torch.optim.Optimizer) -> tuple[Each, Each]:
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        controller.scheduler(scheduler)
        return scheduler.step, _nothing

    said, _ = _train(make, first=first)
    assert ["and so did the loop" in one for one in said] == [True]


def _given(controller: dynamix.Controller, optimizer: torch.optim.Optimizer) -> tuple[Each, Each]:
    controller.scheduler(lr_scheduler.CosineAnnealingLR(optimizer, SAMPLES * EPOCHS // 8))
    return _nothing, _nothing


def _by_epoch(controller: dynamix.Controller, optimizer: torch.optim.Optimizer) -> tuple[Each, Each]:
    return _nothing, lr_scheduler.ExponentialLR(optimizer, 0.5).step


def _by_hand(controller: dynamix.Controller, optimizer: torch.optim.Optimizer) -> tuple[Each, Each]:
    def follow() -> None:
        done = controller.samples_seen / (SAMPLES * EPOCHS)
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * done))

    return follow, _nothing


def _on_plateau(controller: dynamix.Controller, optimizer: torch.optim.Optimizer) -> tuple[Each, Each]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return lambda: scheduler.step(1.0), _nothing


@pytest.mark.parametrize("make", [_given, _by_epoch, _by_hand, _on_plateau])
def test_schedules_by_samples_by_epochs_and_by_hand_are_not(make: Any) -> None:
    assert _train(make) == ([], _train(make)[1])


@pytest.mark.parametrize("options", [{"global_batch": "fixed"}, {"script": [[8]]}])
def test_nor_is_any_where_the_global_batch_stays(options: dict[str, Any]) -> None:
    said, _ = _train(lambda _, o: (SCHEDULERS["cosine"](o).step, _nothing), **options)
    assert said == []


def test_rates_may_be_tensors() -> None:
    said, _ = _train(lambda _, o: (SCHEDULERS["cosine"](o).step, _nothing), lr=torch.tensor(0.1))
    assert len(said) == 1
    assert _train(_given, lr=torch.tensor(0.1))[0] == []


def test_a_schedule_that_was_given_ends_with_the_job_however_the_batch_moves() -> None:
    for script in (MOVING, [[8]], [[40]]):
        _, rates = _train(_given, script)
        assert rates[-1] == pytest.approx(0.0, abs=1e-9)
        assert min(rates[: 2 * len(rates) // 3]) > 0.01
