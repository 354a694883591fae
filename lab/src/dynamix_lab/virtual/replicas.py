"""Workers with local steps and averaged parameters, in one process: a replica of model and optimizer for each."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.data.plan import pieces_of
from dynamix.errors import ConfigError
from dynamix.runtime.measure.pairs import ConsecutiveNoise
from dynamix.runtime.measure.readings import ACCURACY_ROWS
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.sync.collectives import Workers
from dynamix.runtime.sync.parameter_averaging import Averaging, ParameterAveraging
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.virtual.union_gradient import Indices, Load, ShareSeen, forward, moved

NOISE_EVERY = 64  # gradients of a worker, of which two consecutive ones give the noise scale, as live


class Replicas:
    """W workers. The first has `model` and `optimizer` themselves, the others deep copies.

    Each takes an optimizer step on every piece of its share, in the order in which they begin at even paces. Then a
    live job's code averages the models (`ParameterAveraging`). Dropout masks come from one stream. Learning rates and
    other settings of `optimizer` hold for all workers.

    load       indices -> (inputs, targets), already collated
    recorders  of the workers, which get their noise scale
    most       samples of a piece, by worker
    whole      samples of the piece for which learning rates are meant
    at_times   the first one is also trained outside; the replicas then continue from its state
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        load: Load,
        *,
        recorders: Sequence[Recorder],
        averaging: Averaging,
        at_times: bool = False,
    ) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError("model", type(model).__name__, "a model with parameters to train", "set requires_grad")
        self.loss, self.load = loss, load
        self.device = trained[0].device
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
        self._hall = Hall(len(recorders))
        pairs = [(model, optimizer), *(copy.deepcopy((model, optimizer)) for _ in recorders[1:])]
        self._all = [
            _Replica(*pair, averaging, workers, recorder, at_times=at_times)
            for pair, workers, recorder in zip(pairs, self._hall.workers, recorders, strict=True)
        ]

        self._together = at_times  # the first one has trained alone

    def together(self) -> None:
        """Prepare for a step over gradients, which the first replica takes for all."""
        if not self._together:
            self._hall.meet(replica.meeting.rejoin for replica in self._all)
            self._together = True

    @property
    def payload(self) -> float:
        """Bytes of an averaging over those of a gradient."""
        return self._all[0].meeting.payload

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of all workers."""
        return [replica.optimizer for replica in self._all]

    def __call__(
        self,
        shares: Sequence[Indices],
        *,
        most: Sequence[int],
        whole: int,
        begins: Callable[[float], None],
        follow: Callable[[float], None],
    ) -> tuple[list[list[ShareSeen]], RoundApart]:
        """Make a round on the workers' `shares`. Returns what each saw of its pieces, and the round for a cluster.

        most     upper limit on each worker's samples per piece: those of a `whole` one, or fewer if memory is short
        begins   gets the finished fraction of the round, 0 to 1, when a piece begins, so that schedules advance
        follow   adapts learning rates to a part of a whole piece
        """
        first = self._all[0].optimizer
        if self._together:
            for replica in self._all[1:]:
                replica.go_on_from(self._all[0])
            self._together = False
        for replica in self._all:
            replica.meeting.begin()
        cut = [list(_cut(share, cap)) for share, cap in zip(shares, most, strict=True)]
        seen: list[list[ShareSeen]] = [[] for _ in cut]
        turns = [(at / len(pieces), worker, at) for worker, pieces in enumerate(cut) for at in range(len(pieces))]
        for over, worker, at in sorted(turns):
            replica, piece = self._all[worker], cut[worker][at]
            begins(over)
            replica.follow(first)
            follow(len(piece) / whole)
            seen[worker].append(self._step(replica, piece))
        total = sum(len(share) for share in shares)
        meetings = (
            functools.partial(replica.meeting.meet, len(share) / total)
            for replica, share in zip(self._all, shares, strict=True)
        )
        payload_bytes = self._hall.meet(meetings)
        pieces = [[piece.samples for piece in of_worker] for of_worker in seen]
        return seen, RoundApart(pieces, payload_bytes, self.gradient_bytes)

    def _step(self, replica: _Replica, piece: Indices) -> ShareSeen:
        """Make one worker's optimizer step."""
        outputs, targets, value = forward(replica.model, self.loss, moved(self.load(piece), self.device))
        value.backward()
        replica.observe_pair(len(piece))
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        heads: tuple[Tensor | None, Tensor | None] = (None, None)
        if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            heads = outputs.detach()[:ACCURACY_ROWS].cpu(), targets[:ACCURACY_ROWS].cpu()
        return ShareSeen(len(piece), float(value.item()), float("nan"), *heads)


class _Replica:
    """One worker's model and optimizer, and its side of the averaging."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        how: Averaging,
        workers: Workers,
        recorder: Recorder,
        *,
        at_times: bool,
    ) -> None:
        self.model, self.optimizer, self.recorder = model, optimizer, recorder
        self.meeting = ParameterAveraging(model, how, workers, scaler=None, at_times=at_times)
        self.meeting.add_optimizer(optimizer)
        self._pairs = ConsecutiveNoise(NOISE_EVERY)

    def follow(self, first: Optimizer) -> None:
        """Copy the settings of the first worker's optimizer, which a scheduler may have changed."""
        for own, group in zip(self.optimizer.param_groups, first.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})

    @torch.no_grad()
    def go_on_from(self, first: _Replica) -> None:
        """Copy parameters, buffers and optimizer state from `first`."""
        mine, theirs = self.model, first.model
        for own, other in zip(
            (*mine.parameters(), *mine.buffers()), (*theirs.parameters(), *theirs.buffers()), strict=True
        ):
            own.copy_(other)
        parameters = ([p for g in o.param_groups for p in g["params"]] for o in (self.optimizer, first.optimizer))
        for own, other in zip(*parameters, strict=True):
            if other in first.optimizer.state:
                self.optimizer.state[own] = copy.deepcopy(first.optimizer.state[other])
            else:
                self.optimizer.state.pop(own, None)

    def observe_pair(self, samples: int) -> None:
        """Estimate the noise scale from two consecutive gradients of this worker."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
        if pair := self._pairs.observe(gradients, float(samples)):
            self.recorder.add("pair_noise", float(pair[0].item()))
            self.recorder.add("pair_signal", float(pair[1].item()))


class Hall:
    """The synchronisation point of the workers of one process, each in its own thread: reduces their tensors once all
    have reached it."""

    def __init__(self, count: int) -> None:
        self.workers = [HallWorkers(count, self) for _ in range(count)]
        self.all_here = threading.Barrier(count, self._arrive)
        self._threads = ThreadPoolExecutor(count, "worker")
        self._sent = 0

    def meet(self, meetings: Iterable[Callable[[], None]]) -> int:
        """Run every worker's averaging until all are done. Returns the bytes that each has sent."""
        self._sent = 0
        self.all_here.reset()
        under_way = [self._threads.submit(self._run, meeting) for meeting in meetings]
        errors = [error for future in under_way if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return self._sent

    def _run(self, meeting: Callable[[], None]) -> None:
        try:
            meeting()
        except BaseException:
            self.all_here.abort()
            raise

    @torch.no_grad()
    def _arrive(self) -> None:
        for parts in zip(*(workers.begun for workers in self.workers), strict=True):
            flats, op = [flat for flat, _ in parts], parts[0][1]
            total = flats[0].clone()
            for flat in flats[1:]:
                _REDUCED[str(op)](total, flat)
            for flat in flats:
                flat.copy_(total)
            self._sent += total.numel() * total.element_size()
        told = [workers.told for workers in self.workers]
        for workers in self.workers:
            workers.begun, workers.of_all = [], told


class HallWorkers(Workers):
    """One worker's view of it, as `Workers`."""

    def __init__(self, count: int, hall: Hall) -> None:
        super().__init__(None)
        self._count, self._hall = count, hall
        self.begun: list[tuple[Tensor, Any]] = []
        self.told: Any = None
        self.of_all: list[Any] = []

    @property
    def count(self) -> int:
        return self._count

    def add(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self.begun.append((flat, op))

    def wait(self) -> None:
        self._hall.all_here.wait()

    def gather(self, mine: Any) -> list[Any]:
        self.told = mine
        self.wait()
        return self.of_all


_REDUCED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    str(dist.ReduceOp.SUM): lambda total, flat: total.add_(flat),
    str(dist.ReduceOp.MAX): lambda total, flat: total.copy_(torch.maximum(total, flat)),
    str(dist.ReduceOp.MIN): lambda total, flat: total.copy_(torch.minimum(total, flat)),
}


def _cut(share: Indices, most: int) -> Iterator[Indices]:
    """The pieces of a share, in order; none for an empty one."""
    at = 0
    for size in pieces_of(len(share), most) if share else ():
        yield share[at : at + size]
        at += size
