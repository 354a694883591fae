"""A small job for every way of meeting, trained by the loop of the README or with its passes under `piece()`."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from tests.runtime.jobs import in_turns, wait_for_decisions
from tests.union import Script

WAYS = ("gradients", "parameters", "auto")
SAMPLES, BATCH, PIECE = 331, 8, 4


class Net(nn.Module):
    """Of some `kind`; "twin" has two outputs, and "sometimes" a layer that some batches do not use."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if kind == "batchnorm" else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.norm(self.first(x)))
        if self.kind in ("reentrant", "recomputed"):
            h = checkpoint(self._through_middle, h, use_reentrant=self.kind == "reentrant")
        elif self.kind != "sometimes" or x[0, 0] > 0:
            h = self._through_middle(h)
        return (self.last(h), self.last(h.flip(1))) if self.kind == "twin" else self.last(h)

    def _through_middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.middle(h)) + h


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    """What a job is made with.

    options     of the controller
    shares      that its policy deals in turn
    double      it trains in float64
    in_eval     its passes are those of a model in eval mode
    evaluates   it looks at the model after every optimizer step, without gradients
    forwards    passes of a batch before its backward pass
    within      by so much may models differ that are trained the same
    """

    meet: str = "auto"
    kind: str = "plain"
    optimizer: str = "sgd"
    ddp: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    shares: Sequence[Sequence[int]] = ((12, 4), (10, 6), (14, 2))
    double: bool = False
    num_workers: int = 0
    epochs: int = 3
    compiled: str = ""  # the net "inside" of DDP, or what is "around" it
    sharded: bool = False  # by FSDP2, not under DDP
    reshard: bool | None = None  # its `reshard_after_forward`
    in_eval: bool = False
    evaluates: bool = False
    forwards: int = 1
    within: float = 0.0


def dataset() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x[:, :3].argmax(1))


@dataclass
class Trained:
    """What a rank did: by round its way, and the model after it; the loss of every batch."""

    apart: list[bool] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def switches(self) -> int:
        return sum(one != other for one, other in itertools.pairwise(self.apart))

    def differs_from(self, other: Trained, within: float) -> str:
        """In words; "" if it is the same, to the last bit or within so much."""
        if self.apart != other.apart or len(self.losses) != len(other.losses):
            return f"{len(self.apart)} rounds, {len(self.losses)} losses in place of {other.apart}, {len(other.losses)}"
        found = (torch.stack(seen.weights) for seen in (self, other))
        apart = [*_apart(*found).amax(1).tolist(), *_apart(*map(torch.tensor, (self.losses, other.losses))).tolist()]
        return "" if max(apart) <= within else f"by round and batch, they differ by {apart}"


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """By element; those that are equal are apart by 0, also two infinities."""
    return torch.where(one == other, 0.0, (one - other).abs().nan_to_num(torch.inf))


class Job:
    """One rank's, of `case`; with `pieces` its passes are under `controller.piece()`."""

    def __init__(self, case: Case, *, pieces: bool = False) -> None:
        self.case, self.pieces, self.seen = case, pieces, Trained()
        given: dict[str, Any] = {"interval": 2, "meet": case.meet}
        if case.meet == "parameters":
            given |= {"micro_batch": PIECE, "max_batch_size": 64}
        wait_for_decisions()
        in_turns()
        self.controller = dynamix.Controller(Script(case.shares), BATCH, **{**given, **case.options})
        x, y = dataset().tensors
        data = TensorDataset(x.double() if case.double else x, y)
        self.sampler = self.controller.batch_sampler(data, seed=1)
        self.loader = DataLoader(data, batch_sampler=self.sampler, num_workers=case.num_workers)
        self.net = Net(case.kind).double() if case.double else Net(case.kind)
        inner = torch.compile(self.net, backend="eager") if case.compiled == "inside" else self.net
        whole = shard(self.net, case.reshard) if case.sharded else DDP(inner, **case.ddp)
        self.model: Any = torch.compile(whole, backend="eager") if case.compiled == "around" else whole
        self.optimizer = OPTIMIZERS[case.optimizer](self.net.parameters())

    def wrap(self, **options: Any) -> None:
        self.controller.wrap(self.model, self.optimizer, **options)

    def batches(self, loader: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of some epochs."""
        for epoch in range(self.case.epochs):
            self.sampler.set_epoch(epoch)
            yield from self.loader if loader is None else loader

    def passes(self) -> AbstractContextManager[None]:
        """What the passes of a batch are under."""
        return self.controller.piece() if self.pieces else contextlib.nullcontext()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of `case.forwards` passes, with the losses of all their outputs in it."""
        outputs: list[Tensor] = []
        for number in range(self.case.forwards):
            output = self.model(x if number == 0 else x.flip(1))
            outputs += output if isinstance(output, tuple) else [output]
        return torch.stack([F.cross_entropy(output, y) for output in outputs]).mean()

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        with self.passes():
            loss = self.loss(x, y)
            loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, loss: Tensor) -> None:
        """`controller.step`; after it, what there is to see."""
        apart = self.sampler.piece().round.apart
        self.controller.step(loss=loss)
        self.seen.losses.append(float(loss.detach()))
        if self.controller.met:
            self.seen.apart.append(apart)
            self.seen.weights.append(flat(self.net))

    def keep(self, value: float) -> bool:
        """Note it with the losses; false, so that a loop goes on."""
        self.seen.losses.append(value)
        return False

    def evaluate(self) -> float:
        """Of this rank alone: the loss over some samples."""
        x, y = dataset().tensors
        was = self.model.training
        self.model.eval()
        with torch.no_grad():
            found = float(F.cross_entropy(self.net(x[:32]), y[:32])) + float(self.model(x[:4]).sum()) * 0
        self.model.train(was)
        return found


def flat(net: nn.Module) -> Tensor:
    """All that it holds; a collective call if it is sharded."""
    held = (t.full_tensor() if isinstance(t, DTensor) else t for t in net.state_dict().values())
    return torch.cat([t.detach().flatten().double() for t in held])


def shard(net: Net, reshard: bool | None = None) -> nn.Module:
    """By FSDP2, over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net.first, net.middle, net.last, net):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return net


Loop = Callable[[Job], None]


def the_loop(job: Job) -> None:
    """The README's, but for the question that pieces of a round over gradients need."""
    job.wrap()
    if job.case.in_eval:
        job.model.eval()
    for x, y in job.batches():
        loss = job.backward(x, y)
        if job.case.meet != "gradients" or job.controller.optimizer_due:
            job.update()
        job.step(loss)
        if job.case.evaluates:
            job.evaluate()


def trained(loop: Loop, case: Case, *, pieces: bool) -> Trained:
    job = Job(case, pieces=pieces)
    loop(job)
    job.controller.close()
    return job.seen


def compared(rank: int, asked: dict[str, tuple[Loop, Case]]) -> dict[str, tuple[str, int, int]]:
    """By name: how the plain loop differs from that of `piece()`, "" if it does not; rounds; switches of way.

    Nothing is asked after one that raised an error.
    """
    told: dict[str, tuple[str, int, int]] = {}
    for name, (loop, case) in asked.items():
        try:
            plain, pieces = (trained(loop, case, pieces=under) for under in (False, True))
            told[name] = plain.differs_from(pieces, case.within), len(plain.apart), plain.switches
        except Exception:
            told[name] = traceback.format_exc(), 0, 0
            break
    return told


def ended(rank: int, loop: Loop, case: Case) -> tuple[str, float]:
    """What the loop ends with on this rank, as its user reads it, with notes and warnings; after how many seconds."""
    job, began = Job(case), time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            loop(job)
            job.controller.close()
            said = "accepted"
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            said = "".join(traceback.format_exception_only(error))
    return "\n".join([said, *(str(warning.message) for warning in warned)]), time.monotonic() - began
