"""Loops under Accelerate and Fabric, and the rows that are trained under every framework."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.jobs import CLIP, RESUMED_BY_OTHERS, Row, Trail, flat, followed, loader, sgd

ROWS = [
    Row("grow", accumulate=2),
    Row("grow", clip=True, tokens=True),
    Row("shrink", accumulate=2, clip=True),
    Row("shrink", tokens=True, accumulate=2, stop=3),
    Row("move", accumulate=2, clip=True, how="hook"),
    *RESUMED_BY_OTHERS,
]
IN_PIECES = [
    Row("move", how="pieces", clip=True, tokens=True, stop=4, to=3),
    Row("move", how="rounds", clip=True),
]


def _accelerated(row: Row, part: Part) -> None:
    from accelerate import Accelerator

    from dynamix.integrations import accelerate

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=row.accumulate)
    controller, model, optimizer, batches = accelerate.prepare(
        accelerator, row.settings(), part.net, part.optimizer, loader(row), **part.wrapping()
    )
    part.begin(controller)
    for batch in part.batches(batches):
        with contextlib.nullcontext() if row.in_pieces else accelerator.accumulate(model):
            accelerator.backward(part.loss(model, batch))
            if row.clip and controller.optimizer_due:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            if controller.optimizer_due or not row.in_pieces:
                optimizer.step()
                optimizer.zero_grad()
        controller.step()


def _fabric(row: Row, part: Part) -> None:
    from lightning.fabric import Fabric

    from dynamix.integrations import fabric

    of = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    of.launch()
    pieces = {} if row.in_pieces else {"accumulate": row.accumulate}
    controller, model, optimizer, batches = fabric.setup(
        of, row.settings(**pieces), part.net, part.optimizer, loader(row), **part.wrapping()
    )
    part.begin(controller)
    for batch in part.batches(batches):
        due = controller.optimizer_due
        with contextlib.nullcontext() if row.in_pieces else of.no_backward_sync(model, enabled=not due):
            of.backward(part.loss(model, batch) / row.accumulate)
        if due:
            if row.clip:
                of.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
        controller.step()


class Part:
    """A job, or one of the two parts of one that is resumed: it begins with what `file` holds, or leaves that."""

    def __init__(self, row: Row, file: Path, *, resume: bool) -> None:
        self.row, self.file, self.resume = row, file, resume
        self.net = row.net()
        self.optimizer = sgd(self.net)
        self.trail = followed(self.net, self.optimizer)
        self.epoch = 0

    def wrapping(self) -> dict[str, Any]:
        weighting = "loss" if self.row.tokens else "hook"
        return self.row.wrapping(weighting=weighting)

    def begin(self, controller: Any) -> None:
        self.controller = controller
        if self.resume:
            state = torch.load(self.file, weights_only=True)
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            controller.load_state_dict(state["controller"])
            self.epoch = state["epoch"]

    def batches(self, batches: Any) -> Any:
        """Those of all epochs, until the part ends."""
        stop = None if self.resume else self.row.stop
        while self.epoch < self.row.epochs:
            for batch in batches:
                yield batch
                if self.controller.met:
                    self.trail.met.append((len(self.trail.samples), flat(self.net).clone()))
                if self.controller.met and len(self.trail.steps) == stop:
                    self.save()
                    return
            self.epoch += 1

    def loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)["loss"]
        if self.row.tokens:
            return self.controller.weight(loss, count=int((batch["labels"] != -100).sum()))
        return loss

    def save(self) -> None:
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}
        state["controller"] = self.controller.state_dict(gather=True)
        if dist.get_rank() == 0:
            self.file.parent.mkdir(parents=True)
            torch.save(state, self.file)


def train(row: Row, folder: Path, resume: bool, *, stack: str) -> Trail:
    part = Part(row, folder / "job.pt", resume=resume)
    STACKS[stack](row, part)
    part.controller.close()
    return part.trail


STACKS: dict[str, Any] = {"accelerate": _accelerated, "fabric": _fabric}


def lightning(row: Row, folder: Path, resume: bool) -> Trail:
    from tests.integrations.lightning_jobs import fit

    return fit(row, folder, resume)


def lightning_on_two_ranks(rank: int, folder: str) -> Any:
    from tests.integrations.lightning_jobs import on_two_ranks

    return on_two_ranks(rank, folder)
