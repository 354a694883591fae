"""Rank 0's part of a decision: from the gathered rows to the message, and its line in the events file."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dynamix.errors import ConfigError, StateError
from dynamix.events.background import BackgroundLog
from dynamix.events.records import EventLog, read_events
from dynamix.policies import Policy
from dynamix.policies.wrappers import after_answer, report_of, window_length_of
from dynamix.projection import project
from dynamix.runtime.agreement import Kind, Message
from dynamix.runtime.job import Closing, JobFacts
from dynamix.runtime.observation import ROW, assemble
from dynamix.runtime.sameness import by_rank
from dynamix.window import Floats, Ints, Window

_log = logging.getLogger("dynamix")


class Decider:
    """Asks the policy, or looks a recorded run up; one decision at a time. Only the rank that decides has one.

    job     what this rank holds as every other; the noise scale in it is kept up here
    replay  window index -> what to answer instead of asking the policy; other windows are answered "keep"
    clock   seconds; what `time_s` in the events counts
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
        self._decided: tuple[Closing, Window] | None = None
        self._asked = -1  # index of the last window that the policy was asked about
        self._clock, self._started = clock, clock()

    def decide(self, rows: Floats, closing: Closing | None = None) -> Message:
        """Rows (W, n) of `observation.ROW` to the message of the window `closing` (None: the newest)."""
        closing, self._decided = self.job.closing if closing is None else closing, None
        window = self.assemble(rows, closing)
        self._decided = closing, window
        if self.replay is not None:
            return self._replayed(self.replay.get(closing.window_index))
        self._asked = closing.window_index
        bounds = self.job.bounds_after(window, closing)
        wish = np.asarray(self.policy.decide(window, bounds))
        if wish.shape != closing.sizes.shape:
            fix = "return one size per worker"
            raise ConfigError("shape of the policy's answer", wish.shape, str(closing.sizes.shape), fix)
        # Another way of meeting counts rounds otherwise: their sizes are no change of these.
        current = closing.sizes if self.job.same_way(closing.sizes, bounds.total_low) else None
        answer = project(wish, bounds, current=current)
        self._say_change(answer, closing)
        same = np.array_equal(answer, closing.sizes)
        told = self.keep(Kind.KEEP) if same else self.job.change(answer, int(np.nanmax(rows[:, 0])))
        return replace(told, interval=window_length_of(self.policy) or 0)

    def _say_change(self, answer: Ints, closing: Closing) -> None:
        rounds = self.job.rounds
        if rounds is not None and not self.job.same_way(answer, closing.sizes):
            _log.info("after %d samples: %s", closing.samples, rounds.report["why"])

    def keep(self, kind: Kind) -> Message:
        """The message that changes nothing."""
        return self.job.keep(kind)

    def skip(self, rows: Floats, closing: Closing, message: Message) -> None:
        """A window that was answered "late", the policy being busy: only the noise scale and the events see it."""
        self.witness(self.assemble(rows, closing), closing, message)

    def witness(self, window: Window, closing: Closing, message: Message) -> None:
        """Write down what the ranks decided without this one's help; `window` is what this one saw."""
        self._decided = closing, window
        self.write_event(message)

    def write_event(self, message: Message) -> None:
        """One line of events.jsonl, after the message went out."""
        if self.events is not None and self._decided is not None:
            closing, window = self._decided  # training has gone on: `self.job.closing` may be the next one already
            of = {"window_index": closing.window_index, "window": window}
            told = {"allocation": message.sizes.tolist(), "from_step": message.from_step}
            told |= {"decision": message.kind.name.lower(), "noise": message.noise, "signal": message.signal}
            if message.interval:
                told["interval"] = message.interval
            about = report_of(self.policy, asked=closing.window_index == self._asked)
            if self.job.rounds is not None:
                about = {**about, "rounds": self.job.rounds.report}
            at = {"samples_seen": closing.samples, "time_s": self._clock() - self._started}
            self.events.write(**of, **told, **at, **about)
        after_answer(self.policy)  # the answer is out: no step waits for this

    def assemble(self, rows: Floats, closing: Closing) -> Window:
        """What the policy sees of the gathered rows (W, n). It also keeps up the noise scale."""
        window = assemble(rows, noise_scale=self.job.noise_scale, sizes=closing.sizes, **self.job.facts(closing))
        self.job.unlike = self.job.unlike or out_of_turn(rows)
        if self.job.weight_test is not None and closing.comparable:
            self.job.weight_test.look(window)
        return window

    def _replayed(self, event: dict[str, Any] | None) -> Message:
        told = self.keep(Kind.KEEP)
        if event is None:
            return told
        if event["decision"] == "new":
            sizes = np.asarray(event["allocation"], dtype=np.int64)
            if sizes.shape != self.job.closing.sizes.shape:
                here = str(self.job.closing.sizes.size)
                raise ConfigError("replay", f"{sizes.size} workers", here, "replay with as many workers as the run had")
            told = self.job.message(Kind.NEW, event["from_step"], project(sizes, self.job.bounds_of(sizes)))
        # The noise scale too is the recorded run's: a late answer there carried that of an earlier window, and the
        # learning rate may follow it. Older versions did not write it.
        given = event.get("noise", told.noise), event.get("signal", told.signal)
        noise, signal = (float("nan") if value is None else float(value) for value in given)
        return replace(told, noise=noise, signal=signal, interval=event.get("interval", 0))


_ALIKE = {
    "epoch": ("are in epochs that differ", "Call sampler.set_epoch(epoch) alike on every rank"),
    "crossed": (
        "have sent unlike numbers of gradients, so that those of different batches were added up",
        "Pass a batch over, and go on after an error in one, on all ranks or on none",
    ),
}


def out_of_turn(rows: Floats) -> str | None:
    """What ranks did by a window's end that others did not, by its rows (W, n); None if nothing.

    >>> rows = np.zeros((2, len(ROW)))
    >>> rows[1, ROW.index("epoch")] = 3
    >>> out_of_turn(rows)
    'the ranks are in epochs that differ: 0 on rank 0, 3 on rank 1. Call sampler.set_epoch(epoch) alike on every rank'
    """
    for name, (what, do) in _ALIKE.items():
        values = rows[:, ROW.index(name)]
        if (values != values[0]).any():
            return f"the ranks {what}: {by_rank([f'{value:.0f}' for value in values])}. {do}"
    return None


_ANSWER = ("decision", "from_step", "allocation", "noise", "signal", "interval")


def recorded(path: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Window index -> what an earlier run's events file says was answered, for `Decider(replay=)`.

    Raises `StateError` for a file whose lines do not say it.
    """
    answers = {}
    for number, event in enumerate(read_events(path), 1):
        answer = {k: event[k] for k in _ANSWER if k in event}
        if why := _unfit(event.get("window_index"), answer):
            fix = "replay the events.jsonl of a job, unchanged"
            raise StateError(f"{os.fspath(path)}, event {number}: {why}; {fix}")
        answers[event["window_index"]] = answer
    return answers


def _unfit(index: Any, answer: dict[str, Any]) -> str:
    """What is wrong with a recorded answer; empty if nothing is."""
    if type(index) is not int or index < 0:
        return f"window_index={index!r} is no whole number"
    if answer.get("decision") not in ("new", "keep", "late", "failed"):
        return f"decision={answer.get('decision')!r} is none of new, keep, late, failed"
    for name in ("noise", "signal"):
        if type(answer.get(name)) not in (int, float, type(None)) or abs(answer.get(name) or 0) > _MOST:
            return f"{name}={answer[name]!r} is no number"
    interval = answer.get("interval", 0)
    if type(interval) is not int or not 0 <= interval <= _MOST:
        return f"interval={interval!r} is no number of steps"
    if answer["decision"] != "new":
        return ""
    if type(answer.get("from_step")) is not int or not 0 <= answer["from_step"] <= _MOST:
        return f"from_step={answer.get('from_step')!r} is no round"
    sizes = answer.get("allocation")
    if type(sizes) is not list or set(map(type, sizes)) != {int} or not 0 <= min(sizes) <= max(sizes) <= _MOST:
        return "allocation is no list of batch sizes"
    return ""


_MOST = 2**53
