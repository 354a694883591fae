"""How long the steps of a window took."""

import math
from collections import deque
from typing import NamedTuple

from dynamix.probes.timing import RECENT, StepTimer, StepTimes, pause_in

MOST_STEPS = 4096  # of a window that are kept: an epoch can be long


class Dealt(NamedTuple):
    """What is known of a step that a window keeps.

    first           of its epoch: starting a loader's iterator is not waiting for data
    samples, work   of this rank's share, and what they cost in samples of mean cost; NaN where that is not known
    """

    first: bool
    samples: float = math.nan
    work: float = math.nan


class WindowTimes:
    """Of the window now open, and of the last steps before it, since a pause is told by those.

    pauses   steps that were left out so far: this worker, or one that it had to wait for, paused in them
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._steps: deque[StepTimes] = deque(maxlen=MOST_STEPS)
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._sees_communication = True

    def see_no_communication(self) -> None:
        """Waits hide in what is measured as `compute`, which is then not known."""
        self._sees_communication = False

    def read(self, timer: StepTimer) -> None:
        """Take what `timer` has of steps that are kept: those that it was told of as `Dealt`."""
        self._steps.extend([times for times in timer.take() if times.told is not None])

    def forget(self) -> None:
        """The open window is not measured."""
        self._steps.clear()

    def close(self) -> dict[str, list[float]]:
        """By name, seconds of each step, and what was dealt; all NaN in a step that holds a pause. The window ends."""
        whole_s: list[float] = []  # everything in them that is training
        found: dict[str, list[float]] = {name: [] for name in ("compute", "comm", "data", "samples", "work")}
        for times in self._steps:
            first, samples, work = times.told
            data = math.nan if first else times.data
            whole_s.append(sum(filter(math.isfinite, (times.compute, times.comm, data))))
            compute = times.compute if self._sees_communication else math.nan
            for series, value in zip(found.values(), (compute, times.comm, data, samples, work), strict=True):
                series.append(value)
        paused = pause_in(whole_s, self._recent_s)
        self._recent_s.extend(whole_s)
        if paused is not None:
            self.pauses += 1
            for series in found.values():
                series[paused] = math.nan
        self.forget()
        return found
