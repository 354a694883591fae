"""Rank 0's part of a decision: from the gathered rows to the message and a line in the events file."""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.events.background import BackgroundLog
from dynamix.events.records import EventLog, reported
from dynamix.model.sync_schedule import Conditions
from dynamix.policies import Policy
from dynamix.policies.wrappers import report_of, window_length_of
from dynamix.projection import project
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts, Kind, Message
from dynamix.runtime.measure.row import HELD, ROW, assemble
from dynamix.runtime.ranks.compare import by_rank
from dynamix.window import Bounds, Floats, Ints, Window

_log = logging.getLogger("dynamix")


class Decider:
    """Asks the policy, or replays a recorded run; one decision at a time. Only the deciding rank has one.

    job     state that is equal on all ranks; this object updates its noise scale
    replay  window index -> decision used instead of asking the policy; other windows are answered "keep"
    clock   seconds, as in the events' `time_s`
    """

    def __init__(
        self,
        policy: Policy,
        job: JobFacts,
        *,
        replay: dict[int, dict[str, Any]] | None = None,
        events: EventLog | BackgroundLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy, self.job = policy, job
        self.replay, self.events = replay, events
        self._decided: tuple[ClosedWindow, Window] | None = None
        self._asked = -1  # index of the last window that the policy was asked about
        self._clock, self._started = clock, clock()
        self._began_at: int | None = None  # samples trained on before the first step of this process
        self._told_s = 0.0  # of the last line written

    def begin(self, samples: int) -> None:
        """The first step begins, after `samples` in earlier processes: `time_s` counts from here."""
        self._started, self._began_at = self._clock(), samples

    def decide(self, rows: Floats, closing: ClosedWindow | None = None) -> Message:
        """From rows (W, n) of `measure.row.ROW` to the message about the window `closing` (None: the newest)."""
        closing, self._decided = self.job.closing if closing is None else closing, None
        window = self.assemble(rows, closing)
        self._decided = closing, window
        return replace(self._decided_on(window, closing, rows), differ=self.job.parting.differ())

    def _decided_on(self, window: Window, closing: ClosedWindow, rows: Floats) -> Message:
        if self.replay is not None:
            return self._replayed(self.replay.get(closing.window_index))
        self._asked = closing.window_index
        schedule = self.job.sync_schedule
        now = Conditions(closing.piece, closing.payload, closing.samples)
        answer, piece = schedule.decide(self._asked_of_policy, window, self.job.bounds, now)
        if bool(piece) != bool(closing.piece):
            _log.info("after %d samples: %s", closing.samples, schedule.report["why"])
        same = piece == closing.piece and np.array_equal(answer, closing.sizes)
        told = self.job.keep(Kind.KEEP) if same else self.job.change(answer, int(np.nanmax(rows[:, 0])), piece)
        return replace(told, interval=window_length_of(self.policy) or 0)

    def _asked_of_policy(self, window: Window, bounds: Bounds) -> Ints:
        wish = np.asarray(self.policy.decide(window, bounds))
        if wish.shape != window.batch_size.shape:
            fix = "return one size per worker"
            raise ConfigError("shape of the policy's answer", wish.shape, str(window.batch_size.shape), fix)
        return project(wish, bounds, current=window.batch_size)

    def witness(self, window: Window, closing: ClosedWindow, message: Message) -> None:
        """Write an event for a decision that was made without this object; `window` is what this rank measured."""
        self._decided = closing, window
        self.write_event(message)

    def write_event(self, message: Message) -> None:
        """Write one line of events.jsonl, after the message was sent."""
        if self.events is not None and self._decided is not None:
            closing, window = self._decided  # training goes on, so `self.job.closing` may already be the next one
            about = reported(report_of(self.policy, asked=closing.window_index == self._asked))
            if report := self.job.sync_schedule.report:
                about = {**about, "rounds": report}
            self._write(closing, window, message, self._clock(), **about)

    def end(self, rest: ClosedWindow | None, ended_s: float) -> None:
        """Write a last line for the steps after the last window, if there are any, and close the events file.

        These steps ended at `ended_s` of the clock. The line's measurements are unknown, because no other rank is
        asked, and it is not shown to any policy, rule or model.
        """
        if self.events is None:
            return
        if rest is not None:
            window = Window.of(rest.sizes, steps=rest.step - self.job.closing.step, **self.job.facts(rest))
            message = self.job.message(Kind.KEEP, rest.consumed, rest.sizes, rest.piece)
            with contextlib.suppress(RuntimeError):  # at exit no thread can start; no line was written before
                self._write(rest, window, message, ended_s, short=True)
        self.events.close()

    def _write(self, closing: ClosedWindow, window: Window, message: Message, now_s: float, /, **about: Any) -> None:
        assert self.events is not None
        of = {"window_index": closing.window_index, "window": window}
        told = {"allocation": message.sizes.tolist(), "from_step": message.from_step}
        told |= {"decision": message.kind.name.lower(), "noise": message.noise, "signal": message.signal}
        if message.interval:
            told["interval"] = message.interval
        if message.piece:
            told["piece"] = message.piece
        self._told_s = max(now_s - self._started, self._told_s)  # an answer may come after later steps
        at = {"samples_seen": closing.samples, "time_s": self._told_s}
        if self._began_at is not None:
            at["began_at"] = self._began_at
        self.events.write(**of, **told, **at, **about)

    def assemble(self, rows: Floats, closing: ClosedWindow) -> Window:
        """The window that the policy gets, from the gathered rows (W, n). Also updates the noise scale."""
        # Successive gradients of local steps correlate too little, because a worker's step moves against its own noise.
        # That estimate is good enough to show, but not to choose a batch by.
        tells = not closing.piece or self.job.fixed
        known, noise_scale = self.job.facts(closing), self.job.noise_scale
        window = assemble(rows, noise_scale=noise_scale, sizes=closing.sizes, tells_noise=tells, **known)
        self.job.look(rows[:, _HELD], out_of_turn(rows))
        if self.job.weight_test is not None and closing.comparable:
            self.job.weight_test.look(window)
        return window

    def _replayed(self, event: dict[str, Any] | None) -> Message:
        told = self.job.keep(Kind.KEEP)
        if event is None:
            return told
        if event["decision"] == "new":
            sizes = np.asarray(event["allocation"], dtype=np.int64)
            if sizes.shape != self.job.closing.sizes.shape:
                here = f"a run of {self.job.closing.sizes.size}"
                raise ConfigError("replay", f"{sizes.size} workers", here, "replay with as many workers as the run had")
            piece = event.get("piece", 0)
            bounds = self.job.sync_schedule.bounds_of(piece, self.job.bounds)
            told = self.job.message(Kind.NEW, event["from_step"], project(sizes, bounds), piece)
        # The noise scale is the recorded run's, too: a late answer there carried an earlier window's, and the learning
        # rate may depend on it.
        noise, signal = (float("nan") if event[name] is None else float(event[name]) for name in ("noise", "signal"))
        return replace(told, noise=noise, signal=signal, interval=event.get("interval", 0))


_HELD = slice(ROW.index(HELD[0]), len(ROW))
_ALIKE = {
    "epoch": ("are in different epochs", "Give set_epoch() the same epoch on every rank"),
    "crossed": (
        "have sent different numbers of gradients, so gradients of different batches were added up",
        "Skip a batch, or continue after an error in one, on all ranks or on none. A closure (L-BFGS, a line search) "
        "must return the same loss on every rank: the mean over all samples of the ranks",
    ),
}


def out_of_turn(rows: Floats) -> str | None:
    """What only some ranks did before a window's end, from its rows (W, n); None if nothing.

    >>> rows = np.zeros((2, len(ROW)))
    >>> rows[1, ROW.index("epoch")] = 3
    >>> out_of_turn(rows)
    'the ranks are in different epochs: 0 on rank 0, 3 on rank 1. Give set_epoch() the same epoch on every rank'
    """
    for name, (what, do) in _ALIKE.items():
        values = rows[:, ROW.index(name)]
        if (values != values[0]).any():
            return f"the ranks {what}: {by_rank([f'{value:.0f}' for value in values])}. {do}"
    return None
