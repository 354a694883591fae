"""Loops under Accelerate and Fabric: every row exact, each sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamix.integrations import accelerate, fabric
from tests.integrations.jobs import CLIP, LIMIT, Row, Trail, as_under_torchrun, check, followed, loader, sgd
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiproc
ROWS = [
    *(
        Row(shares, accumulate=a, clip=c, tokens=t)
        for shares in ("grow", "shrink")
        for a, c, t in ((1, False, False), (2, False, False), (1, True, True), (2, True, False), (2, False, True))
    ),
    Row("move", accumulate=2, clip=True),
    *(
        Row(shares, stop=4, tokens=t, accumulate=a)
        for shares, t, a in (("grow", False, 1), ("shrink", True, 2), ("move", False, 2))
    ),
]


def _accelerated(row: Row, part: Part) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=row.accumulate)
    weighting = "loss" if row.tokens else "hook"
    controller, model, optimizer, batches = accelerate.prepare(
        accelerator, row.settings(), part.net, part.optimizer, loader(row), weighting=weighting
    )
    part.begin(controller)
    for _ in range(part.epoch, row.epochs):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = part.loss(model, batch)
                accelerator.backward(loss)
                if row.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            controller.step()
            if part.over():
                return


def _fabric(row: Row, part: Part) -> None:
    from lightning.fabric import Fabric

    of = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    of.launch()
    weighting = "loss" if row.tokens else "hook"
    controller, model, optimizer, batches = fabric.setup(
        of, row.settings(accumulate=row.accumulate), part.net, part.optimizer, loader(row), weighting=weighting
    )
    part.begin(controller)
    for _ in range(part.epoch, row.epochs):
        for batch in batches:
            due = controller.optimizer_due
            with of.no_backward_sync(model, enabled=not due):
                of.backward(part.loss(model, batch) / row.accumulate)
            if due:
                if row.clip:
                    of.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
            controller.step()
            if part.over():
                return


class Part:
    """A job, or one of the two parts of one that is resumed."""

    def __init__(self, row: Row, before: Part | None = None) -> None:
        self.row, self.before = row, before
        self.net = row.net()
        self.optimizer = sgd(self.net)
        self.trail = followed(self.net, self.optimizer)
        self.epoch = 0
        self.state: dict[str, Any] = {}

    def begin(self, controller: Any) -> None:
        self.controller = controller
        if self.before is not None:
            self.net.load_state_dict(self.before.state["net"])
            self.optimizer.load_state_dict(self.before.state["optimizer"])
            controller.load_state_dict(self.before.state["controller"])
            self.epoch = controller._coordinator.source.epoch

    def loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)["loss"]
        if self.row.tokens:
            return self.controller.weight(loss, count=int((batch["labels"] != -100).sum()))
        return loss

    def over(self) -> bool:
        if self.before is not None or len(self.trail.steps) != self.row.stop or not self.controller.met:
            return False
        self.state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.state["controller"] = self.controller.state_dict()
        return True


def train_rows(rank: int, stack: str) -> list[list[Trail] | Trail]:
    as_under_torchrun(rank)
    torch.set_default_dtype(torch.float32)
    trails = []
    for row in ROWS:
        part = Part(row)
        STACKS[stack](row, part)
        part.controller.close()
        trail = part.trail
        if row.stop is not None:
            rest = Part(row, part)
            STACKS[stack](row, rest)
            rest.controller.close()
            moved = [(n + len(trail.samples), p) for n, p in rest.trail.steps]
            trail = Trail(trail.samples + rest.trail.samples, trail.steps + moved)
        trails.append(trail)
    return trails


STACKS: dict[str, Any] = {"accelerate": _accelerated, "fabric": _fabric}


@pytest.mark.parametrize("stack", STACKS)
def test_every_row_is_exact(stack: str) -> None:
    by_rank = run_ranks(train_rows, 2, stack, timeout_s=250, group_timeout_s=100)
    for row, *trails in zip(ROWS, *by_rank, strict=True):
        assert check(row, trails) <= LIMIT, row
