"""Splits one worker's step time: computing, communicating, all that comes before the forward pass.

The clock is the CPU's, or CUDA events on a CUDA device. Events are recorded when work is enqueued, and read steps
later, once they have completed. So a device is never synchronised here.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError
from dynamix.window import Floats

# A step that took longer than this many times every other recent one contains a pause.
PAUSE = 2.0
RECENT = 32  # steps compared; a long step that recurs within them is the worker's own pace (throttling, long samples)

Mark = Any  # a point in time that only its own clock can read


class Clock(Protocol):
    """Makes marks and reads them later. The interface between `StepTimer` and a device."""

    def mark(self) -> Mark:
        """A mark for now, in the order of work on the current stream."""

    def passed(self, *marks: Mark) -> bool:
        """Whether all `marks` can be read. Never blocks."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Time from `start` to `end`, both passed."""

    def recycle(self, *marks: Mark) -> None:
        """Take back `marks` that will not be read again."""


class CpuClock:
    """Marks are readings of the monotonic CPU clock."""

    mark = staticmethod(time.perf_counter)  # avoids a Python frame

    def passed(self, *marks: Mark) -> bool:
        return True

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def recycle(self, *marks: Mark) -> None:
        pass


class CudaClock:
    """Marks are CUDA events on the current stream, pooled because creating one costs more than recording it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, *marks: Mark) -> bool:
        return all(mark.query() for mark in marks)

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def recycle(self, *marks: Mark) -> None:
        self._free.extend(marks)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One optimizer step of one worker, in seconds; NaN where not measured. Micro-steps are summed.

    compute   forward start to last local gradient ready, plus the optimizer's update after the last reduction, minus
              the exchange of buffers. Without a communication hook: forward start to the end of the step
    comm      last local gradient ready to the end of the last reduction: this worker's wait and the transfer together,
              plus the exchange of buffers before the forward pass, measured the same way
    data      end of the previous step to forward start
    total     end of the previous step to the end of this one
    told      the argument of `StepTimer.step_done` for the step
    """

    step: int
    compute: float
    comm: float
    data: float
    total: float
    told: Any = None


@dataclass(slots=True)
class _Micro:
    """The marks of one forward and backward pass."""

    before: Mark | None  # the end of the pass before it
    start: Mark | None = None
    ready: Mark | None = None
    # Reductions may run on several streams, so the last one is known only when they are read.
    reduced: list[Mark] = field(default_factory=list)
    exchanged: list[tuple[Mark, Mark]] = field(default_factory=list)  # beginnings and ends, within the forward pass
    end: Mark | None = None
    data_known: bool = True
    compute_known: bool = True

    def marks(self) -> list[Mark]:
        """All marks except `before`; the mark most likely to be pending comes first."""
        marks = [self.end, self.ready, self.start, *self.reduced, *itertools.chain(*self.exchanged)]
        return [mark for mark in marks if mark is not None]


class StepTimer:
    """Times the optimizer steps of one worker. One per controller; `clock` follows from `device`.

    The calls of a step, in order: `forward_started`, `gradients_ready` for every bucket, `reduced` for every bucket
    (from any thread, on any CUDA stream), `step_done`. If batches accumulate, `micro_done` ends every micro-step but
    the last. Missing calls make the times that depend on them NaN. `first_step` is the index of the first record.

    >>> timer = StepTimer(torch.device("cpu"))
    >>> for _ in range(2):
    ...     timer.forward_started(); timer.gradients_ready(); timer.reduced(); timer.step_done()
    >>> first, second = timer.take()
    >>> first.step, first.compute > 0, first.comm >= 0, first.data         # nothing came before the first step
    (0, True, True, nan)
    >>> second.data >= 0, abs(second.total - second.compute - second.comm - second.data) < 1e-9
    (True, True)
    """

    def __init__(self, device: torch.device, *, first_step: int = 0, clock: Clock | None = None) -> None:
        self.step = first_step
        self._clock: Clock = clock or (CudaClock(device) if device.type == "cuda" else CpuClock())
        self._now = self._clock.mark
        self._micro = _Micro(before=None)
        self._open: list[_Micro] = []
        self._closed: deque[tuple[int, list[_Micro], Any]] = deque()

    def forward_started(self) -> None:
        """Call when a training forward pass begins. Only the first of a (micro-)step counts: it ends `data`.

        If it follows a reduction (another model, or another update), it is timed as a further micro-step.
        """
        if self._micro.reduced:
            self.micro_done()
        if self._micro.start is None:
            self._micro.start = self._now()

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Context manager for the exchange of buffers when a training forward pass begins: waiting and transfer."""
        micro = self._micro
        begun = None if micro.start is None else self._now()
        yield
        if begun is not None:
            micro.exchanged.append((begun, self._now()))

    def gradients_ready(self) -> None:
        """Call when a bucket of local gradients is ready. The last call of a (micro-)step starts `comm`."""
        if self._micro.ready is not None:
            self._clock.recycle(self._micro.ready)
        self._micro.ready = self._now()

    def reduced(self, *_: object) -> None:
        """Call when a bucket's reduction ends. The latest of a (micro-)step ends `comm`. Can be a future's callback."""
        self._micro.reduced.append(self._now())

    def interrupted(self) -> None:
        """Call when something other than training happened: evaluation, a checkpoint. If it was between steps, this
        step's `data` becomes NaN; within a step, its `compute`. `total` becomes NaN in both cases."""
        if self._micro.start is None:
            self._micro.data_known = False
        else:
            self._micro.compute_known = False

    def micro_done(self) -> None:
        """Call at the end of a micro-step that is not the last of its accumulation group."""
        micro = self._micro
        micro.end = self._now()
        self._open.append(micro)
        self._micro = _Micro(before=micro.end)

    def step_done(self, told: Any = None) -> None:
        """Call at the end of the optimizer step: closes its record, which keeps `told`."""
        self.micro_done()
        self._closed.append((self.step, self._open, told))
        self._open = []
        self.step += 1

    def take(self, *, discard: bool = False) -> list[StepTimes]:
        """Records closed since the last call, in order, if the device has finished them; others come with a later call.

        With `discard`, all are dropped, including those that the device has not finished, and the list is empty.
        """
        taken: list[StepTimes] = []
        while self._closed:
            step, micros, told = self._closed[0]
            marks = [mark for micro in reversed(micros) for mark in micro.marks()]
            if not discard:
                if not self._clock.passed(*marks):
                    break
                taken.append(self._read(step, micros, told))
            self._closed.popleft()
            before = micros[0].before
            # The first mark, the end, is also the next record's `before`, which is recycled there.
            self._clock.recycle(*marks[1:], *([] if before is None else [before]))
        return taken

    def _read(self, step: int, micros: list[_Micro], told: Any) -> StepTimes:
        compute, comm, data, known = list[float](), list[float](), list[float](), True
        for micro in micros:
            waited = self._comm(micro)
            # Also correct if every reduction ended before the last gradient was ready, when comm is clipped to zero.
            compute.append(self._between(micro.start, micro.end) - waited if micro.compute_known else np.nan)
            data.append(self._between(micro.before, micro.start) if micro.data_known else np.nan)
            # Passes under no_sync have no communication; it is unknown only if no pass had any.
            if micro.ready is not None or micro.exchanged:
                comm.append(waited)
            known = known and micro.data_known and micro.compute_known
        total = self._between(micros[0].before, micros[-1].end) if known else np.nan
        return StepTimes(step, sum(compute), sum(comm) if comm else np.nan, sum(data), total, told)

    def _comm(self, micro: _Micro) -> float:
        exchange = sum(itertools.starmap(self._between, micro.exchanged))
        if micro.ready is None:
            return exchange
        ends = [self._between(micro.ready, mark) for mark in micro.reduced]
        return max(0.0, *ends) + exchange if ends else np.nan

    def _between(self, start: Mark | None, end: Mark | None) -> float:
        return np.nan if start is None or end is None else self._clock.seconds(start, end)


def pause_in(seconds: Sequence[float], before: Iterable[float]) -> int | None:
    """Index of the one step with a pause: longer than `PAUSE` times every other; None if there is none.

    seconds   whole steps of a window, in order; `before` those of the last windows, all measured by this worker

    A stopped process, a full disk or a garbage collection delays one step. A worker that became slow delays every step
    from then on, so its second slow step already counts. Workers that synchronise every step see the same pause.

    >>> pause_in([0.1, 10.1], [0.1, 0.1]), pause_in([0.1, 0.3, 0.3], [0.1]), pause_in([0.4, 0.1, 0.1], [0.4, 0.1])
    (1, None, None)
    """
    if not seconds:
        return None
    longest = max(range(len(seconds)), key=seconds.__getitem__)
    others = max((*seconds[:longest], *seconds[longest + 1 :], *before), default=seconds[longest])
    return longest if seconds[longest] > PAUSE * others else None


def attribute_wait(comm: ArrayLike) -> tuple[Floats, Floats]:
    """Splits the workers' communication times into waiting and transfer, step by step.

    comm   (k, W) seconds, `StepTimes.comm` of k steps on W workers; NaN if not measured

    A reduction ends for all workers at about the same time, so the last worker to arrive sees only the transfer:
    transfer(t) = min_j comm_j(t) and wait_i(t) = comm_i(t) - transfer(t). Returns their means over the steps, `wait`
    (W,) and `transfer` (W,), the latter the same for all; NaN if no step is left. It works step by step because, if the
    straggler changes, all workers wait although none is slow on average. A step that only one of several workers
    measured is left out. Raises `ConfigError` unless `comm` is 2-D.

    >>> wait, transfer = attribute_wait([[0.010, 0.030], [0.030, 0.010]])     # the straggler changes
    >>> wait.round(3).tolist(), transfer.round(3).tolist()
    ([0.01, 0.01], [0.01, 0.01])
    """
    seen = np.asarray(comm, dtype=np.float64)
    if seen.ndim != 2:
        raise ConfigError("comm.shape", seen.shape, "(steps, workers)", "gather one row of comm per step")
    known = ~np.isnan(seen)
    usable = known.sum(1) >= min(2, seen.shape[1])
    shortest = np.min(seen, axis=1, initial=np.inf, where=known)[usable]
    known = known[usable]
    waits = np.where(known, seen[usable] - shortest[:, None], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        wait = waits.sum(0) / np.where(known.any(0), known.sum(0), np.nan)
    transfer = shortest.mean() if len(shortest) else np.nan
    return wait, np.full(seen.shape[1], transfer)
