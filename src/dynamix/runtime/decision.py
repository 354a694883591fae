"""Rank 0's part of a decision: from the gathered rows to the message, and its line in the events file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.events.records import EventLog, read_events
from dynamix.policies import Policy
from dynamix.policies.guard import Guard
from dynamix.policies.learned.online import LearningPolicy
from dynamix.policies.protocol import part_of
from dynamix.projection import project
from dynamix.runtime.agreement import Kind, Message
from dynamix.runtime.noise import NoiseScale
from dynamix.runtime.observation import assemble
from dynamix.window import Bounds, Floats, Ints, Window


@dataclass(frozen=True, slots=True)
class Closing:
    """The window being decided on, as every rank knows it."""

    window_index: int
    sizes: Ints  # the allocation in force while it was open
    consumed: int  # micro-steps done when it closed
    issued: int  # micro-steps this rank's sampler had issued by then
    age: float  # optimizer steps since `sizes` came into force
    step: int  # optimizer steps done
    samples: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the ranks of an earlier run were told about one window."""

    kind: Kind
    from_step: int
    sizes: Ints
    noise: float | None  # None: a line of a version that did not write it
    signal: float | None


class Decider:
    """Asks the policy, or looks a recorded run up; one decision at a time.

    slack   micro-steps that may still be issued under the old allocation after a window closed
    replay  window index -> what to answer instead of asking the policy; other windows are answered "keep"
    clock   seconds; what `time_s` in the events counts
    """

    def __init__(
        self,
        policy: Policy,
        bounds: Bounds,
        *,
        base_batch: int,
        accumulate: int,
        slack: int,
        replay: dict[int, Recorded] | None,
        events: EventLog | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy, self.bounds = policy, bounds
        self.base_batch, self.accumulate, self.slack = base_batch, accumulate, slack
        self.replay, self.events = replay, events
        self.noise_scale = NoiseScale()
        self.closing = Closing(0, bounds.low, 0, 0, 0.0, 0, 0)
        self._decided: tuple[Closing, Window] | None = None
        self._asked = -1  # index of the last window that the policy was asked about
        self._clock, self._started = clock, clock()

    def decide(self, rows: Floats, closing: Closing | None = None) -> Message:
        """Rows (W, n) of `observation.ROW` to the message of the window `closing` (None: the newest)."""
        closing, self._decided = self.closing if closing is None else closing, None
        window = self._assemble(rows, closing)
        self._decided = closing, window
        if self.replay is not None:
            return self._replayed(self.replay.get(closing.window_index))
        self._asked = closing.window_index
        wish = np.asarray(self.policy.decide(window, self.bounds))
        if wish.shape != closing.sizes.shape:
            fix = "return one size per worker"
            raise ConfigError("shape of the policy's answer", wish.shape, str(closing.sizes.shape), fix)
        answer = project(wish, self.bounds, current=closing.sizes)
        if np.array_equal(answer, closing.sizes):
            return self.keep(Kind.KEEP)
        first_free = int(np.nanmax(rows[:, 0])) + self.slack
        return self._message(Kind.NEW, -(-first_free // self.accumulate) * self.accumulate, answer)

    def keep(self, kind: Kind) -> Message:
        """The message that changes nothing."""
        return self._message(kind, self.closing.consumed, self.closing.sizes)

    def skip(self, rows: Floats, closing: Closing, message: Message) -> None:
        """Measure and write down a window that was answered "late" while the policy was busy with an earlier one.

        The policy never sees it, but the noise scale does.
        """
        self._decided = closing, self._assemble(rows, closing)
        self.write_event(message)

    def witness(self, window: Window, closing: Closing, message: Message) -> None:
        """Write down what the ranks decided without this one's help; `window` is what this one saw."""
        self._decided = closing, window
        self.write_event(message)

    def write_event(self, message: Message) -> None:
        """One line of events.jsonl, after the message went out."""
        if self.events is not None and self._decided is not None:
            closing, window = self._decided  # training has gone on: `self.closing` may be the next one already
            self.events.write(
                window_index=closing.window_index,
                window=window.to_dict(),
                allocation=message.sizes.tolist(),
                from_step=message.from_step,
                decision=message.kind.name.lower(),
                noise=message.noise,
                signal=message.signal,
                samples_seen=closing.samples,
                time_s=self._clock() - self._started,
                **self._reports(),
            )
        learner = part_of(self.policy, LearningPolicy)
        if learner is not None:
            learner.improve()  # the answer is out: no step waits for this

    def _reports(self) -> dict[str, Any]:
        """What parts of the policy have to say of this window, by event key."""
        learner, guard = part_of(self.policy, LearningPolicy), part_of(self.policy, Guard)
        reports = {} if learner is None else {"learning": learner.report()}
        asked = self._decided is not None and self._decided[0].window_index == self._asked
        return reports if guard is None or not asked else reports | {"guard": guard.report()}

    def _assemble(self, rows: Floats, closing: Closing) -> Window:
        return assemble(
            rows,
            noise_scale=self.noise_scale,
            sizes=closing.sizes,
            age=closing.age,
            step=closing.step,
            micro_batches=self.accumulate,
            base_batch=self.base_batch,
        )

    def _replayed(self, recorded: Recorded | None) -> Message:
        if recorded is None:
            return self.keep(Kind.KEEP)
        # The noise scale too is the recorded run's: a late answer there carried that of an earlier window, and the
        # learning rate may follow it.
        noise = self.noise_scale.noise if recorded.noise is None else recorded.noise
        signal = self.noise_scale.signal if recorded.signal is None else recorded.signal
        kept = self.keep(Kind.KEEP)
        if recorded.kind is not Kind.NEW:
            return Message(kept.kind, kept.from_step, noise, signal, kept.sizes)
        return Message(Kind.NEW, recorded.from_step, noise, signal, recorded.sizes)

    def _message(self, kind: Kind, from_step: int, sizes: Ints) -> Message:
        return Message(kind, from_step, self.noise_scale.noise, self.noise_scale.signal, sizes)


def recorded(path: str | os.PathLike[str]) -> dict[int, Recorded]:
    """Window index -> what an earlier run's events file says was answered, for `Decider(replay=)`."""
    return {event["window_index"]: _recorded(event) for event in read_events(path)}


def _recorded(event: dict[str, Any]) -> Recorded:
    def value(name: str) -> float | None:
        if name not in event:
            return None
        return float("nan") if event[name] is None else float(event[name])

    sizes = np.asarray(event["allocation"], dtype=np.int64)
    kind = Kind.NEW if event["decision"] == "new" else Kind.KEEP
    return Recorded(kind, int(event["from_step"]), sizes, value("noise"), value("signal"))
