"""When workers that step apart meet, and what becomes of their models and optimizers then."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dynamix.data import Allocations, BatchSampler, Piece, StepPlan, Stream
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.ending import StoreThread
from dynamix.runtime.liveness import failed_collective
from dynamix.runtime.observation import Recorder
from dynamix.runtime.ranks import Ranks
from dynamix.runtime.weighting import Attached

ANSWER_S = 0.05  # longest wait for the store's word, where it is asked after every piece

_WHERE = "call it where the last piece of a round was stepped: `if controller.met:`"


class StepsApart(Protocol):
    """What of a `Coordinator` meetings concern."""

    steps_apart: bool
    rank: int
    allocations: Allocations
    connected: list[Attached]
    ranks: Ranks | None
    recorder: Recorder
    source: BatchSampler | Stream | None

    def fail(self, error: DynamixError) -> DynamixError: ...


class Meetings:
    """Of one rank of the job `of`, which steps apart from the others in rounds whose plan says so.

    between   this rank has stepped apart since the last meeting

    Where workers may meet early, one that is late asks after every piece how many have done their shares of the round.
    Once half of them have, it meets. What it has left of its share are the next pieces that its loader gives, and open
    its next round. In that round it meets early no sooner than it is done with them, so it never has more left than a
    share. An epoch's last round is for all to finish.
    """

    def __init__(self, of: StepsApart) -> None:
        self.of, self.between = of, False
        self._next: int | None = None  # the round at whose end is the next meeting
        self._trained = 0  # samples of this rank since the last one
        self._left = np.zeros(of.allocations.workers, dtype=np.int64)  # samples of their shares, at the last one
        self._arrived: Arrived | None = None

    @property
    def early(self) -> bool:
        """Whether workers may meet before their shares are done."""
        return any(attached.meeting is not None and attached.meeting.how.early for attached in self.of.connected)

    def begin(self) -> None:
        """An iteration begins: whatever was left is dealt anew."""
        self._next, self._trained, self._left = None, 0, np.zeros_like(self._left)
        source = self.of.source
        if source is not None and self.early:
            if not isinstance(source, BatchSampler) or source.partition != "stream":
                fix = "leave early out, or use controller.batch_sampler(dataset), whose partition is 'stream'"
                raise self.of.fail(UsageError(f"Averaging(early=True) deals what is left in another order: {fix}"))
            source.meets_early = True

    def ends(self, piece: Piece) -> bool:
        """A piece is over. Whether this rank's round ends with it, early or not."""
        of = self.of
        self.land()
        self.between = piece.plan.apart
        for attached in of.connected:
            if attached.meeting is not None and piece.plan.apart and piece.samples:
                attached.meeting.steps += 1
        if not self.early or of.allocations.workers == 1:
            return piece.last
        self._trained += piece.samples
        plan = piece.plan
        if self._next is None:
            self._next = plan.index
        if plan.index < self._next:
            return False  # of the round before
        if of.recorder.device.type == "cuda":  # or it would be late on the device only
            torch.cuda.synchronize(of.recorder.device)
        arrived = self._counter()
        if not piece.last and (plan.last or not arrived.enough(plan)):
            return False
        arrived.tell(plan, of.rank)
        return True

    def _counter(self) -> Arrived:
        if self._arrived is None:
            assert self.of.ranks is not None
            ending = self.of.ranks.ending
            self._arrived = Arrived(ending.store, f"{ending.prefix}/arrived")
        return self._arrived

    def meet(self, piece: Piece) -> tuple[int, float]:
        """After the piece that ends a round. Where workers step apart, a collective call: their models become one.

        Returns the samples that all have trained since the last meeting, and this rank's share of the round over its
        own.
        """
        of, plan = self.of, piece.plan
        if not plan.apart:
            return plan.samples, 1.0
        if of.allocations.workers == 1 or not self.early:
            self._average(piece.share / plan.samples, last=plan.last)
            return plan.samples, 1.0
        before, mine = int(self._left.sum()), self._trained
        left = torch.zeros(self._left.size, dtype=torch.int64)
        left[of.rank] = piece.share - piece.offset - piece.samples
        # All have trained no more than that together, so the weights' sum is 1 at most.
        self._average(mine / (plan.samples + before), left)
        self._left, self._trained, self._next = left.numpy(), 0, plan.index + 1
        assert isinstance(of.source, BatchSampler)
        of.source.meet(plan, self._left)
        return plan.samples + before - int(self._left.sum()), piece.share / mine if mine and piece.share else 1.0

    def before_step(self, attached: Attached) -> None:
        """An optimizer of a model that meets in both ways is about to step."""
        meeting, source = attached.meeting, self.of.source
        if meeting is None or source is None or source.issued <= source.consumed:
            return
        if source.plan().apart:
            meeting.begin()
        else:
            with _naming(attached, "the ranks could not average the state of their optimizers"):
                meeting.together()

    @functools.cached_property
    def payload(self) -> float:
        """Bytes that a meeting moves over those of a gradient, by what optimizers remember when it is first asked."""
        every = [attached.meeting.payload for attached in self.of.connected if attached.meeting is not None]
        return max(every, default=1.0)

    def _average(self, weight: float, beside: Tensor | None = None, *, last: bool = True) -> None:
        """`weight` is this rank's; `beside` becomes its sum over workers meanwhile. `last`: see `ParameterMeeting`."""
        of = self.of
        of.recorder.gradients_ready()
        for attached in of.connected:
            if attached.meeting is not None:
                with _naming(attached, "the ranks could not average their models"):
                    if beside is not None:
                        attached.meeting.beside.add(beside)
                    attached.meeting.meet(weight, last=last)
                beside = None
        of.recorder.reduced()
        self.between = False

    def land(self) -> None:
        """Moves that travel while training goes on have to arrive now."""
        for attached in self.of.connected:
            if attached.meeting is not None and attached.meeting.lands:
                with self.of.recorder.timer.exchanging(), _naming(attached, "the ranks could not average their models"):
                    attached.meeting.land()

    def facts(self) -> dict[str, Any]:
        """What every rank must hold alike of how models are averaged, by name."""
        every = [attached.meeting.facts() for attached in self.of.connected if attached.meeting is not None]
        return {f"averaging: {name}": [facts[name] for facts in every] for name in (every[0] if every else ())}

    def require(self, what: str) -> None:
        """Raise `UsageError`, on all ranks, between two meetings."""
        if self.between:
            raise self.of.fail(UsageError(f"{what}, and the workers' models differ between two meetings: {_WHERE}"))

    def require_no(self, what: str) -> None:
        """Raise `UsageError` where workers step apart, and so weigh nothing in their own passes."""
        if self.of.steps_apart:
            why = "with meet='parameters' a worker's loss is the mean over its own samples, and moves are weighted"
            raise UsageError(f"{what}: {why}. Call loss.backward()")

    def warn_between(self) -> None:
        """The loop has ended: say so if models differ."""
        if self.between and sys.exc_info()[0] is None:
            left = "the loop was left between two meetings, so the workers' models differ"
            warnings.warn(f"{left}: leave it where controller.met is true", RuntimeWarning, stacklevel=3)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`Controller.optimizer_state`."""
        if not self.of.steps_apart:
            fix = "save optimizer.state_dict(), which all ranks have alike"
            raise UsageError(f"optimizer_state() is for Controller(meet='parameters'): {fix}")
        self.require("optimizer_state() is the mean over workers")
        for attached in self.of.connected:
            if attached.meeting is not None and any(optimizer is own for own in attached.meeting.optimizers):
                with _naming(attached, "the ranks could not average the state of an optimizer"):
                    return attached.meeting.optimizer_state(optimizer)
        raise UsageError("optimizer_state() got an optimizer that controller.wrap(model, optimizer) was not given")


@contextlib.contextmanager
def _naming(attached: Attached, what: str) -> Iterator[None]:
    """A failed collective inside becomes an error that names the rank."""
    try:
        yield
    except RuntimeError as error:
        if not failed_collective(error):
            raise
        raise attached.explain(error, what) from error


class Arrived:
    """How many workers have done their share of a round, as a counter in the job's store tells.

    It counts on from round to round: of every round all workers that have a share, late ones when they meet.
    """

    def __init__(self, store: StoreThread, key: str) -> None:
        self._store, self._key = store, key
        self._before = 0  # of earlier rounds
        self._known = 0
        self._asked: threading.Event | None = None

    def enough(self, plan: StepPlan) -> bool:
        """Whether half of those that have a share have done it. Does not wait for a store that hangs."""
        if self._asked is None or self._asked.is_set():
            self._asked = self._store.ask(self._look)
            self._asked.wait(ANSWER_S)
        with_share = int(np.count_nonzero(plan.counts))
        return self._known - self._before >= max(-(-with_share // 2), 1)

    def _look(self, store: Any) -> None:
        self._known = int(store.add(self._key, 0))

    def tell(self, plan: StepPlan, rank: int) -> None:
        """This rank meets now."""
        if plan.counts[rank]:
            self._store.ask(lambda store: store.add(self._key, 1))
        self._before += int(np.count_nonzero(plan.counts))
