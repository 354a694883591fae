"""Ranks that part while they train: settings, the place in the data, parameters; and what only looks so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, classes, classifier

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]
FROM, INTERVAL = 30, 5
Loop = Callable[[Training, int, int], None]  # what a user's loop does after an optimizer step, by step and rank


def _deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _train(
    rank: int,
    loop: Loop,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    steps: int = 60,
    policy: str = "static",
    wrap: dict[str, Any] | None = None,
) -> str:
    controller = dynamix.Controller(policy, 8, interval=INTERVAL)
    net = _deep()
    job = Training(controller, classes(8 * steps * controller.world_size), net, optimizer=kind(net.parameters(), **options), **(wrap or {}))
    done = 0
    try:
        for x, y in job.loader:
            job.backward(x, y)
            if controller.optimizer_due:
                job.update()
            loop(job, done, rank)
            controller.step()
            done += 1
    except UsageError as error:
        return f"after {done}: {error}"
    controller.close()
    return "silent"


def _set(name: str, value: Any) -> Loop:
    """Rank 1 sets it from some step on."""
    return _Setting(name, value)


class _Setting:
    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __call__(self, job: Training, step: int, rank: int) -> None:
        if step >= FROM and rank == 1:
            job.optimizer.param_groups[0][self.name] = self.value


def _group_on_one(job: Training, step: int, rank: int) -> None:
    if step == FROM and rank == 1:
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def _scheduled_by_rank(job: Training, step: int, rank: int) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.1 * (0.99 if rank else 0.98) ** step


SGD, ADAM = torch.optim.SGD, torch.optim.AdamW
PARTED = {
    "rate": (_set("lr", 0.05), SGD, {"lr": 0.1}, "lr of parameter group 0 is 0.1 on rank 0, 0.05 on rank 1"),
    "rate as tensor": (_set("lr", torch.tensor(0.5)), SGD, {"lr": 0.1}, "0.1 on rank 0, 0.5 on rank 1"),
    "decay": (_set("weight_decay", 0.1), SGD, {"lr": 0.1}, "weight_decay of parameter group 0 is 0 on rank 0, 0.1 on"),
    "momentum": (_set("momentum", 0.8), SGD, {"lr": 0.1, "momentum": 0.9}, "momentum of parameter group 0 is 0.9 on"),
    "betas": (_set("betas", (0.9, 0.99)), ADAM, {}, "betas of parameter group 0 is [0.9, 0.999] on rank 0, [0.9, 0.99]"),
    "maximize": (_set("maximize", True), ADAM, {}, "maximize of parameter group 0 is false on rank 0, true on rank 1"),
    "a group": (_group_on_one, SGD, {"lr": 0.1}, "each parameter group is [[4]] on rank 0, [[4, 1]] on rank 1"),
}


@pytest.mark.parametrize("case", PARTED)
def test_settings_that_differ_end_all_ranks_and_are_named(case: str) -> None:
    loop, kind, options, words = PARTED[case]
    for said in run_ranks(_train, 2, loop, kind, options):
        assert words in said
        assert FROM < int(said.split()[1].strip(":")) <= FROM + 2 * INTERVAL + 2


@pytest.mark.parametrize("policy", ["stigmergic", "lb_bsp"])
def test_every_policy_compares_settings(policy: str) -> None:
    for said in run_ranks(_train, 3, _scheduled_by_rank, SGD, {"lr": 0.1}, 60, policy):
        assert "lr of parameter group 0 is 0.0" in said
