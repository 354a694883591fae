"""Records of one rank's steps, and how they become a row."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

# Host and network change slower than short windows follow each other, and a sample costs most of what a window costs.
PROBE_EVERY_S = 2.0
# Times of finished steps are read together: code that is warm costs a quarter of code that runs once a step.
READ_EVERY = 16
# Accuracy is read once in so many steps, and at least twice a window: its deviation is what its change is measured in.
ACCURACY_EVERY = 4
# Squared norms cost a pass over the gradient each: they are measured in the first step of a window, and in every so
# many after it.
NORMS_EVERY = 5
MOST_STEPS = 4096  # of a window that are kept: an epoch can be long
_FIELDS = {"local_sq": "gradient_norm_sq", "global_sq": "global_norm_sq"}  # of a row, of series of another name
_SERIES = (*_FIELDS, "loss", "accuracy", "pair_noise", "pair_signal")
_NOT_KNOWN = (math.nan, math.nan)


class Recorder(Part):
    """One rank's measurements of the window now open. Never synchronises a device.

    On CUDA, sums stay on the device and travel to the host asynchronously; a row uses the newest that has arrived,
    which may be a window old.

    clock   of the marks; None: that of the device
    """

    name, own = "recorder", True

    def __init__(self, device: torch.device, *, clock: Clock | None = None) -> None:
        self.device = device
        self.timer = StepTimer(device, clock=clock)
        self.times = WindowTimes()
        self.reader = Reader()
        self.probes = Probes(device)
        self.steps = 0
        self.last: dict[str, float] = {}  # of the window that closed last, by their names in `Controller.metrics`
        self._sent = Newest(([], ({}, {})))
        self._open: dict[str, list[tuple[int, Value, float]]] = {}
        self._lock = threading.Lock()
        self._kept: dict[str, list[Value]] = {}
        self._windows = 0
        self._before: dict[str, tuple[float, float]] = {}
        self.muted = False

    # -- setting up

    def measure_on(self, device: torch.device) -> None:
        """Training runs on `device`: its clock and its probes count from now on."""
        if device == self.device:
            return
        loaded = self.state_dict()
        self.device, self.timer = device, StepTimer(device, first_step=self.timer.step)
        self.probes, self._sent = Probes(device), Newest(([], ({}, {})))
        self.load_state_dict(loaded)

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Passes inside are discarded: nothing of them is measured."""
        muted, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = muted

    # -- from the hook (autograd's thread and the backend's)

    def norms_due(self) -> bool:
        """Whether this optimizer step's squared norms are to be measured. The same on all ranks in steps that count."""
        return self.steps % NORMS_EVERY == 0 and not self.muted

    def add(self, name: str, value: Value, *, part: int = 0, weight: float = 1.0) -> None:
        """One 0-dim value of this optimizer step; squares add up over parts (buckets), others are averaged by weight.

        Squares of a part may come once for each reduction of the step; `_squares` says what is made of them.
        """
        if not self.muted:
            with self._lock:
                # Plain floats where reading costs nothing: torch's own arithmetic on scalars is 20 times slower.
                if isinstance(value, Tensor):
                    value = value.detach() if value.is_cuda else value.item()
                self._open.setdefault(name, []).append((part, value, weight))

    # -- from Controller.step

    def observe(self, loss: Any, logits: Any, target: Any, *, samples: float = 1.0, over: float = 1.0) -> None:
        """Statistics of one batch of `samples`, left on its device. Takes whatever a loop has; see `Reader`.

        over   what the loss is over the mean over the samples
        """
        # A number on the CPU is nearly always what comes.
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
        """Close one optimizer step. `keep` False: it belongs to no window (a tail, or the allocation is switching).

        dealt   samples of this rank's share and what they cost, in samples of mean cost, where that is known
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
        """Close the window: this rank's row, length len(ROW) + steps kept, the tail being comm seconds step by step.

        count, weight    this rank's samples and part of a round; where costs are known, of the mean round instead
        epoch, crossed   of the window's last round, and backward passes that have crossed ranks so far: alike on all
        held             the fields of `HELD`; none where there are no other ranks
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
        known |= self.probes.sample() | dict(zip(HELD, held, strict=False))
        steps = min(self.steps, MOST_STEPS)
        comm = of_steps["comm"][-steps:] if steps else []
        self.last = {"compute_s": known["compute"], "exchange_s": _mean_std(comm)[0], "data_s": known["data"]}
        self.last |= {name: known[name] for name in ("loss", "accuracy")}
        comm += [math.nan] * (steps - len(comm))
        self.reset()
        return np.array([*[known.get(name, math.nan) for name in ROW], *comm])

    def _newest(self, of_window: dict[str, float]) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Statistics of the window that closes, and what is known of it; on CUDA of the newest that have arrived."""
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
        """Forget the open window."""
        self.steps, self._kept = 0, {}
        self.timer.take(discard=True)
        self.times.forget()

    def _change(self, name: str, mean: float, std: float) -> float:
        before, self._before[name] = self._before.get(name), (mean, std)
        if before is None:
            return float("nan")
        pooled = math.hypot(std, before[1]) / math.sqrt(2)  # a state that was loaded may hold figures of any size
        return float((mean - before[0]) / pooled) if pooled > 0 else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """The statistics of the open window and of the last one; times are not worth saving."""
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
    """The times of the window now open, and of the last steps before it, since those tell a pause.

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
        """Take what `timer` has of steps that are kept: those of which it was told something.

        That is whether the step is the first of its epoch, since starting a loader's iterator is not waiting for data;
        and samples of this rank's share, and what they cost in samples of mean cost, NaN where that is not known.
        """
        self._steps.extend([times for times in timer.take() if times.told is not None])

    def forget(self) -> None:
        """The open window is not measured."""
        self._steps.clear()

    def close(self) -> dict[str, list[float]]:
        """End the window: the seconds of each step, by name, and what was dealt; all NaN in a step with a pause."""
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


@dataclass
class Newest:
    """The newest values of a device that are on the host, for which nobody waits; with what is to be known of them.

    One copy from a CUDA device is under way at a time; the values of a CPU are here at once.

    here   both; before any have arrived, what is to be known then
    """

    here: tuple[list[float], Any]
    _under_way: tuple[Tensor, torch.cuda.Event, Any] | None = field(default=None, init=False)

    def send(self, values: list[Tensor], about: Any) -> None:
        """Take what has arrived. If nothing is under way then, `values`, 0-dim, are the newest once they are there."""
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
    """The probes of this machine and `device`, and what they said last."""

    def __init__(self, device: torch.device) -> None:
        self.asked = [] if device.type == "meta" else probes_here(device)
        self._said: dict[str, float] = {}
        self._again_s = 0.0  # on the clock `time.monotonic`

    def sample(self) -> dict[str, float]:
        """The figures that they say, or said just before; one that raises is warned of, and not asked again."""
        if time.monotonic() < self._again_s:
            return self._said
        self._said, self._again_s = {}, time.monotonic() + PROBE_EVERY_S
        for probe in list(self.asked):
            try:
                self._said |= probe.sample()
            except Exception as error:
                self.asked.remove(probe)
                text = f"the {probe.name} probe failed ({error!r}): what it measures is unknown (NaN) from now on"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        return self._said


def _by_part(measured: list[tuple[int, Value, float]]) -> dict[int, list[Value]]:
    """Values by part, in order: reductions end in any order, and a sum must not depend on it."""
    return {part: [value for of, value, _ in measured if of == part] for part in sorted({of for of, *_ in measured})}


def _squares(local: dict[int, list[Value]], reduced: dict[int, list[Value]]) -> dict[str, Value]:
    """|g_i|^2 and |g|^2 of an optimizer step, from squares of what went into and came out of its reductions, by bucket.

    Under DDP the k-th reduction takes x_k = R_{k-1} + l_k, what all ranks have reduced so far and this rank's new
    gradient, and gives R_k. The last R is g. The ranks' scatter is that of the x, so |g_i|^2 is estimated without bias
    by |R_last|^2 + (reductions / those seen) * sum (|x_k|^2 - |R_k|^2); with one reduction it is |x_1|^2 itself. If the
    loss carries the weight, only x_1 tells l, since R has another weight; `local` then holds it alone.
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
    if len({*weights}) == 1:  # so that a single value stays what it is
        return sum(values) / len(values)
    return sum([value * weight for _, value, weight in measured]) / sum(weights)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample deviation of what is finite. A window is a few steps: plain Python is ten times faster there."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return _NOT_KNOWN
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum([(v - mean) * (v - mean) for v in known]) / (len(known) - 1))
