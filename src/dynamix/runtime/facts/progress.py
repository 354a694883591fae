"""The progress of a job, in numbers that are equal on every rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamix.data import Round
from dynamix.runtime.part import Part, fields, numbers, wholes, wrong

_COUNTERS = ("window", "steps", "opens", "samples")


@dataclass
class Progress(Part):
    """Counters of a job, and the noise scale that its ranks agreed on.

    window    windows that were answered
    steps     optimizer steps
    opens     first round whose measurements belong to the open window
    samples   samples trained on by all workers
    learned   samples that would have taught as much in rounds of the size at the start (`Rates.efficiency`)
    shared    (round, noise, signal, interval): ranks may get a noise scale at different times, so it counts from an
              agreed round; `interval` is the length of the open window if a policy sets it, else 0
    peak      highest learning rate of the user's at the end of a round, except rounds with the batch that it is for
    passed    batches for which this rank called `step()` without a pass, with `accumulate`; must be equal on all ranks
    here      optimizer steps since this process began or a state was loaded; local steps count as workers' mean
    """

    name = "progress"

    window: int = 0
    steps: int = 0
    opens: int = 0
    samples: int = 0
    learned: float = 0.0
    shared: list[tuple[int, float, float, int]] = field(default_factory=lambda: [(0, math.nan, math.nan, 0)])
    peak: float = 0.0
    passed: int = 0
    here: float = 0.0
    _due: dict[int, float] = field(default_factory=dict)  # value of `here` when it was last due, by `every`

    def due(self, every: int) -> bool:
        """Whether `every` optimizer steps were taken since it was last due; the answer is the same until the next step.

        >>> progress = Progress()
        >>> [progress.due(2) for progress.here in (0.0, 1.5, 3.0, 3.0, 4.5, 5.0)]
        [False, False, True, True, False, True]
        """
        if self.here - self._due.get(every, 0.0) >= every - 1e-6:  # a round may count as a third of a step
            self._due[every] = self.here
        return self._due.get(every) == self.here

    def count(self, done: Round, efficiency: float = 1.0) -> None:
        """A round is done; its samples taught `efficiency` times as much each as samples of a round at the start."""
        self.steps += 1
        self.samples += done.samples
        self.learned += done.samples * efficiency
        self.here += done.samples / done.at_once if done.piece else 1.0

    def fallen(self, rate: float | None, *, done: bool = False) -> float:
        """How far the user's learning rate is below its highest so far, as a fraction; 0 if it is not known.

        done   the rate is that at the end of a round, so it counts for the `peak`, which is equal on all ranks

        >>> progress = Progress()
        >>> [progress.fallen(rate, done=True) for rate in (0.5, 1.0, 0.25, None)]
        [0.0, 0.0, 0.75, 0.0]
        """
        most = max(self.peak, float(rate or 0.0))
        self.peak = most if done else self.peak
        return 1 - rate / most if rate else 0.0

    def pass_over(self) -> None:
        """A batch ends that this rank did not train."""
        self.passed += 1

    def told(self, from_step: int, noise: float, signal: float, *, interval: int = 0, opens: int | None = None) -> None:
        """A window was answered; its noise scale counts from round `from_step`.

        interval   length of the next window; 0: unchanged
        opens      first round whose measurements belong to the next window; None: as before
        """
        self.window += 1
        self.opens = self.opens if opens is None else opens
        self.shared = [self.shared[-1], (from_step, noise, signal, interval or self.interval)]

    @property
    def interval(self) -> int:
        """Length of the open window; 0 if no policy set it."""
        return self.shared[-1][3]

    def noise_at(self, step: int) -> tuple[float, float]:
        """(noise, signal) that every rank uses in round `step`."""
        return next((entry[1:3] for entry in reversed(self.shared) if entry[0] <= step), (math.nan, math.nan))

    def state_dict(self) -> dict[str, Any]:
        counted = {name: getattr(self, name) for name in (*_COUNTERS, "learned", "peak")}
        return counted | {"shared": [list(entry) for entry in self.shared]}

    def check(self, state: Mapping[str, Any]) -> None:
        state = {"learned": 0.0, "peak": 0.0, **state}  # states of 0.2 have neither
        fields(self.name, state, {**dict.fromkeys(_COUNTERS, int), "learned": float, "peak": float, "shared": list})
        if not (0 <= state["learned"] < math.inf and 0 <= state["peak"] < math.inf):
            wrong(self.name, state, "learned and peak that are finite, 0 or more")
        name, shared = f"{self.name}.shared", state["shared"]
        if not 1 <= len(shared) <= 2:
            wrong(name, shared, "one or two entries")
        for entry in shared:
            numbers(name, entry, 4)  # round, noise, signal, interval
            wholes(name, list(entry[::3]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window, self.steps, self.opens, self.samples = map(state.__getitem__, _COUNTERS)
        self.learned = state.get("learned", float(self.samples))
        self.peak, self.passed, self.here, self._due = state.get("peak", 0.0), 0, 0.0, {}
        shared = state["shared"]
        self.shared = [(int(step), noise, signal, int(interval)) for step, noise, signal, interval in shared]
