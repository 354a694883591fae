"""Records one rank's measurements, and turns a window's measurements into a row."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.probes import probes_here
from dynamix.probes.timing import RECENT, Clock, StepTimer, StepTimes, pause_in
from dynamix.runtime.measure.readings import Reader, Value
from dynamix.runtime.measure.row import HELD, ROW
from dynamix.runtime.part import Part, fields, numbers, wrong
from dynamix.window import Floats

# Host and network change more slowly than short windows, and probing is the largest cost of a window.
PROBE_EVERY_S = 2.0
# Times of finished steps are read together: code in a warm cache costs a quarter of code that runs once a step.
READ_EVERY = 16
# Accuracy is read every so many steps, and at least twice a window: its deviation is the unit of its change.
ACCURACY_EVERY = 4
# Each squared norm costs a pass over the gradient, so norms are measured only in a window's first step, and in every so
# many steps after it.
NORMS_EVERY = 5
MOST_STEPS = 4096  # most steps kept per window, because an epoch can be long
_FIELDS = {"local_sq": "gradient_norm_sq", "global_sq": "global_norm_sq"}  # fields of a row whose series differ in name
_SERIES = (*_FIELDS, "loss", "accuracy", "pair_noise", "pair_signal")
_NOT_KNOWN = (math.nan, math.nan)


class Recorder(Part):
    """One rank's measurements of the open window. Never synchronises a device.

    On CUDA, sums stay on the device and are copied to the host asynchronously. A row uses the newest copy that has
    arrived, which may be a window old.

    clock   for time stamps; None: the device's
    """

    name, own = "recorder", True

    def __init__(self, device: torch.device, *, clock: Clock | None = None) -> None:
        self.device = device
        self.timer = StepTimer(device, clock=clock)
        self.times = WindowTimes()
        self.reader = Reader()
        self.probes = Probes(device)
        self.steps = 0
        self.last: dict[str, float] = {}  # of the last window that closed, by their names in `Controller.metrics`
        self._sent = Newest(([], ({}, {})))
        self._open: dict[str, list[tuple[int, Value, float]]] = {}
        self._lock = threading.Lock()
        self._kept: dict[str, list[Value]] = {}
        self._windows = 0
        self._before: dict[str, tuple[float, float]] = {}
        self.muted = False

    # -- setting up

    def measure_on(self, device: torch.device) -> None:
        """Training runs on `device`: use its clock and probes from now on."""
        if device == self.device:
            return
        loaded = self.state_dict()
        self.device, self.timer = device, StepTimer(device, first_step=self.timer.step)
        self.probes, self._sent = Probes(device), Newest(([], ({}, {})))
        self.load_state_dict(loaded)

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Passes inside are discarded and not measured."""
        muted, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = muted

    # -- from the hook (autograd's thread and the backend's)

    def norms_due(self) -> bool:
        """Whether to measure squared norms in this optimizer step. In measured steps it is the same on all ranks."""
        return self.steps % NORMS_EVERY == 0 and not self.muted

    def add(self, name: str, value: Value, *, part: int = 0, weight: float = 1.0) -> None:
        """Add one 0-dim value of this step. Squares add up over parts (buckets); other values are averaged by weight.

        A part's squares may come once per reduction of the step; `_squares` combines them.
        """
        if not self.muted:
            with self._lock:
                # Plain floats if reading is free: torch's arithmetic on scalars is 20 times slower.
                if isinstance(value, Tensor):
                    value = value.detach() if value.is_cuda else value.item()
                self._open.setdefault(name, []).append((part, value, weight))

    # -- from Controller.step

    def observe(self, loss: Any, logits: Any, target: Any, *, samples: float = 1.0, over: float = 1.0) -> None:
        """Add the statistics of a batch of `samples`, left on its device. Accepts what a loop has; see `Reader`.

        over   factor by which the loss exceeds the mean over the samples
        """
        # The usual case is a scalar tensor on the CPU.
        plain = type(loss) is Tensor and loss.is_cpu and not loss.dim() and loss.is_floating_point()
        value = loss if plain else self.reader.loss(loss)
        if value is not None:
            value = value if over == 1.0 else value / over
            self.add("loss", value, weight=samples)
        known = self.steps % ACCURACY_EVERY and len(self._kept.get("accuracy", ())) >= 2
        if logits is None or target is None or known:
            return
        if (accuracy := self.reader.accuracy(logits, target, value)) is not None:
            self.add("accuracy", accuracy, weight=samples)

    def step_done(self, *, keep: bool, first_of_epoch: bool, dealt: tuple[float, float] | None = None) -> None:
        """End one optimizer step. `keep` False: it belongs to no window (a tail, or sizes are changing).

        dealt   samples of this rank's share, and their cost in samples of mean cost, if costs are known
        """
        self.timer.step_done((first_of_epoch, *(dealt or _NOT_KNOWN)) if keep else None)
        with self._lock:
            measured, self._open = self._open, {}
        if self.timer.step % READ_EVERY == 0:
            self.times.read(self.timer)
        if not keep:
            return
        self.steps += 1
        if "local_sq" in measured or "global_sq" in measured:
            squares = [_by_part(measured.pop(name, [])) for name in _FIELDS]
            measured = {name: [(0, value, 1.0)] for name, value in _squares(*squares).items()} | measured
        for name, values in measured.items():
            series = self._kept.setdefault(name, [])
            series.append(values[0][1] if len(values) == 1 else _mean(values))
            if len(series) > MOST_STEPS:
                del series[0]

    def row(
        self, *, issued: int, count: float, weight: float, epoch: int = 0, crossed: int = 0, held: Sequence[float] = ()
    ) -> Floats:
        """Close the window. Returns this rank's row, length len(ROW) + steps kept; the tail is comm seconds by step.

        count, weight    this rank's samples and part of a round; if costs are known, of the mean round instead
        epoch, crossed   the last round's epoch, and backward passes that have crossed ranks so far: equal on all ranks
        held             the fields of `HELD`; none for a single rank
        """
        self.times.read(self.timer)
        of_steps = self.times.close()
        self._windows += 1
        samples, _ = _mean_std(of_steps["samples"])
        if count and math.isfinite(samples):
            count, weight = samples, weight * samples / count
        of_window = {"count": count, "weight": weight, "measured_in": float(self._windows)}
        stats, measured = self._newest(of_window)
        known: dict[str, float] = {"issued": issued, "epoch": epoch, "crossed": crossed, **of_window, **measured}
        known |= {name: _mean_std(of_steps[name])[0] for name in ("data", "work")}
        known["compute"], known["compute_std"] = _mean_std(of_steps["compute"])
        for name in _SERIES:
            values = stats.get(name, ())
            known[_FIELDS.get(name, name)], std = _mean_std(values)
            if name == "accuracy" and values and all(map(math.isnan, values)):
                none = "no target of a whole window was a class, or a row of probabilities of classes"
                self.reader.failed(name, none)
            if name in ("loss", "accuracy"):
                known[f"{name}_std"], known[f"{name}_change"] = std, self._change(name, known[name], std)
        known |= self.probes.sample({*ROW} - {*HELD} - known.keys()) | dict(zip(HELD, held, strict=False))
        steps = min(self.steps, MOST_STEPS)
        comm = of_steps["comm"][-steps:] if steps else []
        self.last = {"compute_s": known["compute"], "exchange_s": _mean_std(comm)[0], "data_s": known["data"]}
        self.last |= {name: known[name] for name in ("loss", "accuracy")}
        comm += [math.nan] * (steps - len(comm))
        self.reset()
        return np.array([*[known.get(name, math.nan) for name in ROW], *comm])

    def _newest(self, of_window: dict[str, float]) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """The closing window's statistics and what is known about it; on CUDA those of the newest that have arrived."""
        if self.device.type != "cuda":
            return self._kept, of_window
        lengths = {name: len(series) for name, series in self._kept.items()}
        all_of = [value for series in self._kept.values() for value in series]
        flat = [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in all_of]
        self._sent.send(flat, (lengths, of_window))
        values, (lengths, sent_with) = self._sent.here
        each = iter(values)
        return {name: list(islice(each, length)) for name, length in lengths.items()}, sent_with

    def reset(self) -> None:
        """Discard the open window."""
        self.steps, self._kept = 0, {}
        self.timer.take(discard=True)
        self.times.forget()

    def _change(self, name: str, mean: float, std: float) -> float:
        before, self._before[name] = self._before.get(name, (math.nan, math.nan)), (mean, std)
        pooled = math.hypot(std, before[1]) / math.sqrt(2)  # a loaded state may hold values of any size
        return float((mean - before[0]) / pooled) if pooled > 0 else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """The statistics of the open and the last window; times are not saved."""
        series = {name: [float(value) for value in series] for name, series in self._kept.items()}
        before = {name: list(pair) for name, pair in self._before.items()}
        return {"steps": self.steps, "series": series, "before": before}

    def check(self, state: Mapping[str, Any]) -> None:
        fields(self.name, state, {"steps": int, "series": dict, "before": dict})
        for part, length in (("series", None), ("before", 2)):
            if set(map(type, state[part])) - {str}:
                wrong(f"{self.name}.{part}", list(state[part]), "series by name")
            for name, values in state[part].items():
                numbers(f"{self.name}.{part}.{name}", values, length)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        self.steps = state["steps"]
        for name, series in state["series"].items():
            on_device = torch.tensor(series, device=self.device).unbind() if self.device.type == "cuda" else series
            self._kept[name] = list(on_device)
        self._before = {name: (pair[0], pair[1]) for name, pair in state["before"].items()}


class WindowTimes:
    """The times of the open window, and of the last steps before it, with which pauses are detected.

    pauses   steps left out so far because this worker, or one that it waited for, paused in them
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._steps: deque[StepTimes] = deque(maxlen=MOST_STEPS)
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._sees_communication = True

    def see_no_communication(self) -> None:
        """Waiting is measured as part of `compute`, so `compute` is unknown from now on."""
        self._sees_communication = False

    def read(self, timer: StepTimer) -> None:
        """Take from `timer` the steps to keep: those with a note (see `Recorder.step_done`).

        The note holds whether the step is its epoch's first, because starting a loader's iterator is not waiting for
        data; this rank's samples, and their cost in samples of mean cost, NaN if costs are unknown.
        """
        self._steps.extend([times for times in timer.take() if times.told is not None])

    def forget(self) -> None:
        """Discard the times of the open window."""
        self._steps.clear()

    def close(self) -> dict[str, list[float]]:
        """End the window. Returns each step's seconds and dealt samples, by name; all NaN in a step with a pause."""
        whole_s: list[float] = []  # all training time of a step
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


@dataclass
class Newest:
    """The newest values of a device that have arrived on the host, with a description of them. Never waits.

    From a CUDA device one copy runs at a time; values of a CPU are available at once.

    here   values and description; before any have arrived, the initial ones
    """

    here: tuple[list[float], Any]
    _under_way: tuple[Tensor, torch.cuda.Event, Any] | None = field(default=None, init=False)

    def send(self, values: list[Tensor], about: Any) -> None:
        """Take a finished copy. If none runs then, copy the 0-dim `values`; on a CPU they are available at once."""
        if self._under_way is not None and self._under_way[1].query():
            host, _, of_host = self._under_way
            self.here, self._under_way = (host.tolist(), of_host), None
        if not values or self._under_way is not None:
            return
        flat = torch.stack(values)
        if flat.device.type == "cpu":
            self.here = flat.tolist(), about
            return
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way = host, event, about


class Probes:
    """The probes of this machine and `device`, and their last readings."""

    def __init__(self, device: torch.device) -> None:
        self.asked = [] if device.type == "meta" else probes_here(device)
        self._said: dict[str, float] = {}
        self._again_s = 0.0  # time of the next reading, on the clock `time.monotonic`

    def sample(self, fields: Set[str]) -> dict[str, float]:
        """Their readings, at most `PROBE_EVERY_S` old. A probe that raises or reads more than `fields` is dropped."""
        if time.monotonic() < self._again_s:
            return self._said
        self._said, self._again_s = {}, time.monotonic() + PROBE_EVERY_S
        for probe in list(self.asked):
            try:
                if others := (said := probe.sample()).keys() - fields:
                    raise ValueError(f"it may read {sorted(fields)}, not {sorted(others)}")
                self._said |= said
            except Exception as error:
                self.asked.remove(probe)
                text = f"the {probe.name} probe failed ({error!r}): what it measures is unknown (NaN) from now on"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        return self._said


def _by_part(measured: list[tuple[int, Value, float]]) -> dict[int, list[Value]]:
    """Values by part, in order: reductions end in any order, but a sum must not depend on it."""
    return {part: [value for of, value, _ in measured if of == part] for part in sorted({of for of, *_ in measured})}


def _squares(local: dict[int, list[Value]], reduced: dict[int, list[Value]]) -> dict[str, Value]:
    """|g_i|^2 and |g|^2 of an optimizer step, from the squares of its reductions' inputs and outputs, by bucket.

    Under DDP the k-th reduction takes x_k = R_{k-1} + l_k, what was reduced so far plus this rank's new gradient, and
    returns R_k. The last R is g. The scatter between ranks is that of the x, so |R_last|^2 + (reductions / those
    measured) * sum (|x_k|^2 - |R_k|^2) is an unbiased estimate of |g_i|^2; with one reduction it is |x_1|^2. If the
    loss carries the weight, R has another weight, so only x_1 shows l; `local` then holds only x_1.
    """
    of_step: dict[str, Value] = {}
    if reduced:
        of_step["global_sq"] = sum([values[-1] for values in reduced.values()])
    if local and all(len(values) == 1 for values in (*local.values(), *reduced.values())):
        of_step["local_sq"] = sum([values[0] for values in local.values()])
    elif local and local.keys() == reduced.keys():
        parts: list[Value] = []
        for part, values in local.items():
            after = reduced[part]
            apart = sum([x - r for x, r in zip(values, after, strict=False)])
            parts.append(after[-1] + apart * (len(after) / len(values)))
        of_step["local_sq"] = sum(parts)
    return of_step


def _mean(measured: list[tuple[int, Value, float]]) -> Value:
    values: list[Value] = [value for _, value, _ in measured]
    weights = [weight for *_, weight in measured]
    if len({*weights}) == 1:  # a single value stays exactly as it is
        return sum(values) / len(values)
    return sum([value * weight for _, value, weight in measured]) / sum(weights)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample deviation of the finite values. For a window's few steps plain Python is ten times faster."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return _NOT_KNOWN
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum([(v - mean) * (v - mean) for v in known]) / (len(known) - 1))
