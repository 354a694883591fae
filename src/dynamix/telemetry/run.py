"""One run, read line by line: series in bins, changes of sizes, notices, and figures of the whole run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamix.model.measured import mean_of_known, step_seconds
from dynamix.telemetry.bins import MOST_BINS, BinnedSeries
from dynamix.telemetry.changes import SizeChanges
from dynamix.telemetry.notices import Notices
from dynamix.telemetry.reading import Recorded
from dynamix.window import Floats, Ints, Window

SINGLE = (
    *("global_batch", "noise_scale", "step_s", "loss", "accuracy", "samples_per_s", "samples"),
    *("compute", "data", "wait", "network", "waiting"),
)
EACH = ("size", "compute", "data", "wait", "network")
PAUSE_S = 5.0  # a shorter pause is not worth a notice
BLOCK = 64  # windows whose numbers are computed together
_SHOWN = ("compute", "data", "wait", "communication", "loss", "accuracy")


class RunView:
    """A summary of one run's lines, in bounded memory.

    name       its name on the page
    workers    the most workers of any window; `fewest`: the fewest
    """

    def __init__(self, name: str, most_bins: int = MOST_BINS) -> None:
        self.name = name
        self.series = BinnedSeries(SINGLE, EACH, 0, most_bins)
        self.changes, self.notices = SizeChanges(), Notices()
        self.decisions: Counter[str] = Counter()
        self.windows = 0
        self.workers = self.fewest = 0
        self.steps = 0.0  # optimizer steps of the job at the end of the newest window, including those before a resume
        self.seconds = 0.0  # at the end of the newest window, summed over restarts
        self.samples = 0.0  # of the job at the end of the newest window, including those before this run
        self.began_at = 0.0  # samples of the job before this run
        self.start_sizes = self.sizes = np.empty(0, dtype=np.int64)
        self.noise_scale = math.nan
        self.index = -1  # of the newest window
        self.newest: Window | None = None  # the newest whole one
        self.latest: dict[str, float] = {}  # its numbers of the cluster, by the names in `SINGLE`
        self._waiting: list[tuple[Window, dict[str, float]]] = []  # for `settle`
        self._offset_s = self._time_s = 0.0
        self._start: Any = None  # `began_at` of the newest line
        self._active = 0  # workers of the newest window

    def is_another(self, fields: dict[str, Any]) -> bool:
        """Whether a line begins another run in the same file; a job that resumes from a state is no other run."""
        index, goes_on = fields.get("window_index"), _number(fields.get("began_at")) > 0
        fewer = _number(fields.get("samples_seen")) < self.samples
        return index == 0 and not goes_on and (self.index > 0 or fewer)

    def add(self, line: Recorded) -> None:
        """Take in the next line. Call `settle` after the last one available."""
        fields, window = line.fields, line.window
        begin_s = self.seconds
        self._follow_time(fields, window)
        self._follow_workers(window)
        index, before = fields.get("window_index"), self.index
        self.index = index if type(index) is int and index >= 0 else before + 1
        # In a thinned file a line also stands for the removed ones before it.
        weight = _one(window.steps, least=1.0) * (max(self.index - before, 1) if self.windows else 1)
        short = fields.get("short") is True
        self._follow_samples(fields, window, weight)
        told = {"begin_s": begin_s, "end_s": self.seconds, "weight": weight, "samples": self.samples}
        self.changes.add(window, begin_s, self.index)
        took_s = self.seconds - begin_s
        timed = took_s > 0 and (self.windows or self._start is not None)  # 0.2 included the start-up
        told["samples_per_s"] = self._gained / took_s if timed else math.nan
        if self.windows and took_s > PAUSE_S:  # the first window has the first step, which is slow
            self._find_pause(window, begin_s, took_s)
        self._waiting.append((window, told))
        if len(self._waiting) == BLOCK:
            self.settle()
        if not short:  # a short window holds only samples, and no decision is made on it
            self.newest = window
            self.notices.of_line(fields, self.seconds, self.index)
            self.decisions[str(fields.get("decision"))] += 1
        if not self.windows:
            self.start_sizes = window.batch_size
        self.sizes, self.windows = window.batch_size, self.windows + 1
        # A window's own steps exclude those between two windows, while a decision was pending.
        self.steps = _one(window.step, least=0.0) or self.steps + weight

    def settle(self) -> None:
        """Move the newest windows into `series`, `latest` and `noise_scale`: NumPy is fast for many at once."""
        if not self._waiting:
            return
        windows, told = zip(*self._waiting, strict=True)
        self._waiting = []
        given = {name: np.array([one[name] for one in told], np.float64) for name in told[0]}
        block = _together(windows)
        with np.errstate(all="ignore"):  # a file may hold absurd numbers
            single = _single(block) | {name: given[name] for name in ("samples", "samples_per_s")}
            self.series.extend(given["begin_s"], given["end_s"], given["weight"], single, _each(block))
        whole = next((i for i in reversed(range(len(windows))) if windows[i] is self.newest), None)
        if whole is not None or not self.latest:
            self.latest = {name: float(values[-1 if whole is None else whole]) for name, values in single.items()}
        known = np.flatnonzero(np.isfinite(single["noise_scale"]))
        if known.size:
            self.noise_scale = float(single["noise_scale"][known[-1]])

    # ------------------------------------------------------------ of the whole run

    @property
    def waiting(self) -> Floats:
        """(W,) part of each worker's step time spent waiting for slower ones; NaN if unknown."""
        seconds = self.parts()
        total = sum(np.nan_to_num(value) for value in seconds.values())
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(total > 0, seconds["wait"] / total, np.nan))

    @property
    def mean_waiting(self) -> float:
        """The mean of `waiting` over workers; NaN if unknown."""
        return float(mean_of_known(self.waiting))

    def parts(self) -> dict[str, Floats]:
        """Mean seconds of a step by part, (W,) each."""
        return {name: self.series.overall(name) for name in ("compute", "data", "network", "wait")}

    def newest_parts(self) -> dict[str, Floats]:
        """Seconds of a step by part in the newest window, (W,) each; empty without one."""
        return {} if self.newest is None else {k: v for k, v in _each(self.newest).items() if k != "size"}

    @property
    def seconds_per_sample(self) -> Floats:
        """(W,) busy seconds of a sample, over the whole run; NaN for workers without samples."""
        samples, busy = self.series.overall("size"), np.nan_to_num(self.series.overall("compute"))
        busy = busy + np.nan_to_num(self.series.overall("data"))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where((samples > 0) & (busy > 0), busy / samples, np.nan))

    @property
    def trained(self) -> float:
        """Samples that this run trained on."""
        return self.samples - self.began_at

    @property
    def samples_per_s(self) -> float:
        """Over the whole run, from its first step."""
        return self.trained / self.seconds if self.seconds > 0 else math.nan

    @property
    def reached(self) -> Floats:
        """(bins,) samples of the job at the end of each bin."""
        return self.series.greatest("samples")

    @property
    def speeds(self) -> Floats:
        """(bins,) samples a second: samples trained in a bin over its seconds; NaN if unknown."""
        gained = np.diff(self.reached, prepend=self.began_at)
        took_s = self.series.ends_s - self.series.begins_s
        known = (took_s > 0) & np.isfinite(self.series.mean("samples_per_s"))
        return np.where(known, np.maximum(gained, 0.0) / np.where(known, took_s, 1.0), np.nan)

    # ------------------------------------------------------------ parts of `add`

    def _follow_time(self, fields: dict[str, Any], window: Window) -> None:
        time_s = _number(fields.get("time_s"))
        if math.isnan(time_s):  # lines of a tool without times: assume the duration of its steps
            step_s = float(step_seconds(window))
            self.seconds += _one(window.steps, least=1.0) * (step_s if math.isfinite(step_s) else 1.0)
            return
        start, before = fields.get("began_at"), self._start
        self._start = start
        if self.windows and (time_s < self._time_s or start != before):
            self._offset_s = self.seconds
            self.notices.note(self.seconds, self.index + 1, "restart", "The job was started again and goes on here.")
        self._time_s = time_s
        self.seconds = max(self.seconds, self._offset_s + time_s)

    def _find_pause(self, window: Window, begin_s: float, took_s: float) -> None:
        """Note it if steps took less than half of a window's time. Measured times leave out a step with a pause."""
        step_s = float(step_seconds(window) + np.nan_to_num(mean_of_known(window.data)))
        apart_s = took_s - step_s * self._gained / max(float(window.global_batch), 1.0)
        if apart_s > max(PAUSE_S, took_s / 2):
            text = "s passed outside of measured steps: a pause, evaluation, save, new epoch or compilation."
            self.notices.note(begin_s, self.index, "pause", f"{apart_s:.0f} {text}")

    def _follow_workers(self, window: Window) -> None:
        if self._active != window.workers:
            self.settle()  # a block holds only windows with the same number of workers
        if self._active and window.workers != self._active:
            text = f"The job goes on with {window.workers} workers in place of {self._active}."
            self.notices.note(self.seconds, self.index + 1, "workers", text)
        self._active, self.fewest = window.workers, min(self.fewest or window.workers, window.workers)
        if window.workers > self.workers:
            self.workers = window.workers
            self.series.widen(window.workers)

    def _follow_samples(self, fields: dict[str, Any], window: Window, steps: float) -> None:
        told, gained = _number(fields.get("samples_seen")), steps * float(window.batch_size.sum())
        if not self.windows:
            start = _number(fields.get("began_at"))
            if math.isnan(start):  # a line of 0.2, or of a tool
                start = told - gained if self.index > 0 else 0.0
            self.samples = self.began_at = max(start, 0.0) if math.isfinite(start) else 0.0
        before = self.samples
        self.samples = told if told >= 0 else before + gained
        self._gained = max(self.samples - before, 0.0)


def _together(windows: Sequence[Window]) -> Window:
    """Windows with the same number of workers, stacked along a new first axis."""
    known = {name: np.stack([getattr(window, name) for window in windows]) for name in (*_SHOWN, "noise", "signal")}
    return Window.of(np.stack([window.batch_size for window in windows]), **known)


def _single(window: Window) -> dict[str, Floats]:
    """Numbers of the cluster, (n,) each, of windows (n, W)."""
    step_time = window.step_time
    total = np.where(np.isfinite(step_time), step_time, 0.0).sum(-1)
    waited = np.where(np.isfinite(window.wait) & np.isfinite(step_time), window.wait, 0.0).sum(-1)
    told = (total > 0) & np.isfinite(window.wait).any(-1)
    means = {name: mean_of_known(getattr(window, name)) for name in ("compute", "data", "wait")}
    scale = window.noise_scale
    return means | {
        "global_batch": window.global_batch,
        "noise_scale": np.where(np.isfinite(scale), scale, np.nan),
        "step_s": step_seconds(window) + np.nan_to_num(means["data"]),
        "loss": _weighted(window.loss, window.batch_size),
        "accuracy": _weighted(window.accuracy, window.batch_size),
        "network": mean_of_known(window.communication),
        "waiting": np.where(told, waited / np.where(told, total, 1.0), np.nan),
    }


def _each(window: Window) -> dict[str, Floats]:
    """Numbers of every worker, (..., W)."""
    named = {name: getattr(window, name) for name in ("compute", "data", "wait")}
    return {**named, "size": window.batch_size.astype(np.float64), "network": window.communication}


def _weighted(values: Floats, weights: Ints) -> Floats:
    """Means (n,) of the known values of (n, W); NaN if there are none."""
    counted = np.where(np.isfinite(values), weights, 0.0)
    total = counted.sum(-1)
    return np.where(total > 0, (np.where(counted > 0, values, 0.0) * counted).sum(-1) / np.maximum(total, 1.0), np.nan)


def _one(value: Any, least: float) -> float:
    found = float(value)
    return max(found, least) if math.isfinite(found) else least


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return math.nan
    return float(value)
