"""One rank's steps as rows of seconds, from marks at the ends of their parts."""

from __future__ import annotations

import math
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamix.probes.timing import Clock

# The time between two marks of a step belongs to one of these.
PARTS = ("forward", "backward", "exchange", "update", "between")
FORWARD, BACKWARD, EXCHANGE, UPDATE, BETWEEN = range(5)
# Fields of a row, in order. A step ends with an optimizer step.
FIELDS = ("samples", "passes", *PARTS, "loader", "end_s")
_MOST_MARKS = 4096  # of a step: if a loop's optimizer is not seen, its step never ends
# Marks of this many steps become rows together: code that is warm takes a quarter of the time.
_TOGETHER = 64


class StepRecorder:
    """Marks of the open step, and rows of the closed ones. Never synchronises a device.

    A mark names the part for the time since the mark before. Parts of a row, in seconds:

    forward    from the beginning of the model's forward pass to the beginning of the backward pass, with the loss
    backward   from there to the last local gradient
    exchange   waiting for other ranks and transferring: after the last local gradient, and while buffers or shards of
               parameters cross ranks
    update     from there to the end of the optimizer's step, with clipping
    between    from there to the next forward pass; `loader` is the part of it spent in a `DataLoader`

    clock   a `dynamix.probes.timing.Clock`

    >>> from dynamix.probes.timing import CpuClock
    >>> recorder = StepRecorder(CpuClock())
    >>> for part in (BETWEEN, FORWARD, BACKWARD, EXCHANGE): recorder.mark(part)
    >>> recorder.passed(32)
    >>> recorder.close(0.5)
    >>> row = dict(zip(FIELDS, recorder.take()))
    >>> row["samples"], row["passes"], row["forward"] > 0, row["between"]      # nothing came before the first step
    (32.0, 1.0, True, nan)
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self._now = clock, clock.mark
        self.steps = 0
        self._parts: list[int] = []
        self._marks: list[Any] = []
        self._samples, self.passes, self._loader_s = 0.0, 0, 0.0  # of the open step
        self._closed: deque[tuple[list[int], list[Any], float, int, float, float]] = deque()
        self._last: Any = None  # the mark that ended the step before
        self._rows = array("f")

    def mark(self, part: int) -> None:
        """Name the part of the time since the last mark."""
        if len(self._parts) < _MOST_MARKS:
            self._parts.append(part)
            self._marks.append(self._now())

    def passed(self, samples: float) -> None:
        """Count a forward pass of `samples`; NaN if their number is unknown."""
        self.passes += 1
        self._samples += samples

    def loaded(self, seconds: float) -> None:
        """Add seconds spent waiting for a `DataLoader`."""
        self._loader_s += seconds

    def close(self, end_s: float) -> None:
        """End an optimizer step, `end_s` after observing began."""
        self.mark(UPDATE)
        self._closed.append((self._parts, self._marks, self._samples, self.passes, self._loader_s, end_s))
        self._parts, self._marks = [], []
        self._samples, self.passes, self._loader_s = 0.0, 0, 0.0
        self.steps += 1
        if len(self._closed) >= _TOGETHER:
            self._resolve_all()

    def take(self) -> array[float]:
        """The rows since the last call, concatenated, up to the last step that the device has finished."""
        self._resolve_all()
        rows, self._rows = self._rows, array("f")
        return rows

    def _resolve_all(self) -> None:
        while self._closed and self.clock.passed(self._closed[0][1][-1]):
            self._resolve(*self._closed.popleft())

    def _resolve(
        self, parts: list[int], marks: list[Any], samples: float, passes: int, loader_s: float, end_s: float
    ) -> None:
        seconds, before, clock = [0.0] * len(PARTS), self._last, self.clock
        for part, mark in zip(parts, marks, strict=True):
            seconds[part] += math.nan if before is None else clock.seconds(before, mark)
            if before is not None:
                clock.recycle(before)
            before = mark
        self._last = before
        # The processor may have waited for a loader while the device did not.
        self._rows.extend((samples, passes, *seconds, min(loader_s, seconds[BETWEEN]), end_s))
