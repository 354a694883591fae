"""Rank 0's part of a decision: from the gathered rows to the message, and its line in the events file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dynamix.agreement import Kind, Message
from dynamix.errors import ConfigError
from dynamix.gradients import NoiseScale
from dynamix.observation import assemble
from dynamix.policies import Policy
from dynamix.telemetry.events import EventLog, read_events
from dynamix.window import Bounds, Floats, Ints, Window, project


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


class Decider:
    """Asks the policy, or looks a recorded run up; one decision at a time.

    slack   micro-steps that may still be issued under the old allocation after a window closed
    replay  window index -> (from_step, sizes) to apply instead of asking the policy
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
        replay: dict[int, tuple[int, Ints]] | None,
        events: EventLog | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy, self.bounds = policy, bounds
        self.base_batch, self.accumulate, self.slack = base_batch, accumulate, slack
        self.replay, self.events = replay, events
        self.noise_scale = NoiseScale()
        self.closing = Closing(0, bounds.low, 0, 0, 0.0, 0, 0)
        self._decided: tuple[Closing, Window] | None = None
        self._clock, self._started = clock, clock()

    def decide(self, rows: Floats) -> Message:
        """Rows (W, n) of `observation.ROW` to the message of this window."""
        closing = self.closing
        window = assemble(
            rows,
            noise_scale=self.noise_scale,
            sizes=closing.sizes,
            age=closing.age,
            step=closing.step,
            micro_batches=self.accumulate,
            base_batch=self.base_batch,
        )
        self._decided = closing, window
        if self.replay is not None:
            if closing.window_index in self.replay:
                return self._message(Kind.NEW, *self.replay[closing.window_index])
            return self.keep(Kind.KEEP)
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
                samples_seen=closing.samples,
                time_s=self._clock() - self._started,
            )

    def _message(self, kind: Kind, from_step: int, sizes: Ints) -> Message:
        return Message(kind, from_step, self.noise_scale.noise, self.noise_scale.signal, sizes)


def recorded(path: str | os.PathLike[str]) -> dict[int, tuple[int, Ints]]:
    """The allocations of an earlier run's events file, for `Decider(replay=)`."""
    return {
        event["window_index"]: (event["from_step"], np.asarray(event["allocation"], dtype=np.int64))
        for event in read_events(path)
        if event["decision"] == "new"
    }
