"""What one rank records of its steps, how it becomes a row, and how W rows become a `Window`."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dynamix.probes import probes_here
from dynamix.probes.timing import RECENT, StepTimer, StepTimes, attribute_wait, pause_in
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.runtime.measure.readings import Reader, Value
from dynamix.runtime.part import Part, fields, numbers, wrong
from dynamix.window import PER_WORKER, Floats, Window

# Host and network change slower than short windows follow each other, and a sample costs most of what a window costs.
PROBE_EVERY_S = 2.0
# Times of finished steps are read together: code that is warm costs a quarter of code that runs once a step.
READ_EVERY = 16
# Accuracy is read once in so many steps, and at least twice a window: its deviation is what its change is measured in.
ACCURACY_EVERY = 4
# Squared norms cost a pass over the gradient each: they are measured in the first step of a window, and in every so
# many after it.
NORMS_EVERY = 5
_DERIVED = ("wait", "communication")  # known only when all rows are together
ELEMENTS = 24  # of the parameters, in every row
_MEASURED = (
    *("issued", "count", "weight", "epoch", "crossed", "measured_in", "global_norm_sq", "pair_noise", "pair_signal"),
    *(name for name in PER_WORKER if name not in _DERIVED),
)
HELD = ("digest", "late_digest", "sampled_at", "drawn", *(f"element_{n}" for n in range(ELEMENTS)))
ROW = (*_MEASURED, *HELD)
_NOTHING_HELD = [float("nan")] * len(HELD)
_SUMMED = {"local_sq": "gradient_norm_sq", "global_sq": "global_norm_sq"}
_PLAIN = ("loss", "accuracy", "pair_noise", "pair_signal")


class Recorder(Part):
    """One rank's measurements of the window now open. Never synchronises a device.

    On CUDA, sums stay on the device and travel to the host asynchronously; a row uses the newest that has arrived,
    which may be a window old. `limit` bounds the steps kept (an epoch can be long).
    """

    name, own = "recorder", True

    def __init__(self, device: torch.device, *, limit: int = 4096) -> None:
        self.device, self.limit = device, limit
        self.reader = Reader()
        self.timer = StepTimer(device)
        self.probes = [] if device.type == "meta" else probes_here(device)
        self.steps = 0
        self._times: list[StepTimes] = []
        self._whole_s: list[float] = []  # of the same steps: everything in them that is training
        self.pauses = 0  # steps left out of the times
        self.last: dict[str, float] = {}  # of the window that closed last, by their names in `Controller.metrics`
        self._recent_s: deque[float] = deque(maxlen=RECENT)  # of the windows before
        self._dealt: list[tuple[float, float]] = []  # of the same steps, where costs of samples are known
        self._late: dict[int, tuple[bool, tuple[float, float]]] = {}  # steps of this window not read yet
        self._sees_communication = True
        self._step_index = 0
        self._open: list[tuple[str, int, Value, float]] = []
        self._lock = threading.Lock()
        self._kept: dict[str, list[Value]] = {}
        self._arriving: _Transfer | None = None
        self._arrived: dict[str, list[float]] = {}
        self._arrived_of: dict[str, float] = {}  # the window those belong to: its number, and this rank's count in it
        self._windows = 0
        self._sampled: dict[str, float] = {}
        self._sampled_at = -PROBE_EVERY_S
        self._before: dict[str, tuple[float, float]] = {}
        self.muted = False

    # -- setting up

    def measure_on(self, device: torch.device) -> None:
        """Training runs on `device`: its clock and its probes count from now on."""
        if device == self.device:
            return
        self.device, self.timer = device, StepTimer(device)
        self.probes = probes_here(device)
        for name, series in self._kept.items():  # of a state that was loaded before
            self._kept[name] = [self._on_device(float(value)) for value in series]

    def _on_device(self, value: float) -> Value:
        return torch.tensor(value, device=self.device) if self.device.type == "cuda" else value

    def sees_no_communication(self) -> None:
        """Waits hide in what is measured as `compute`, which is then not known."""
        self._sees_communication = False

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Passes inside are discarded: nothing of them is measured."""
        muted, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = muted

    # -- marks from the hook (autograd's thread and the backend's)

    def gradients_ready(self) -> None:
        if not self.muted:
            self.timer.gradients_ready()

    def reduced(self) -> None:
        if not self.muted:
            self.timer.reduced()

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
                self._open.append((name, part, value, weight))

    # -- from Controller.step

    def observe(self, loss: Any, logits: Any, target: Any, *, samples: float = 1.0, over: float = 1.0) -> None:
        """Statistics of one batch of `samples`, left on its device. Takes whatever a loop has; see `Reader`.

        over   what the loss is over the mean over the samples
        """
        # A number on the CPU is nearly always what comes.
        plain = type(loss) is Tensor and not loss.dim() and loss.is_floating_point() and loss.device.type == "cpu"
        value = loss if plain else self.reader.loss(loss)
        if value is not None:
            value = value if over == 1.0 else value / over
            self.add("loss", value, weight=samples)
        if logits is None or target is None:
            return
        if self.steps % ACCURACY_EVERY and len(self._kept.get("accuracy", ())) > 1:
            return
        accuracy = self.reader.accuracy(logits, target, value)
        if accuracy is not None:
            self.add("accuracy", accuracy, weight=samples)

    def micro_done(self) -> None:
        self.timer.micro_done()

    def step_done(self, *, keep: bool, first_of_epoch: bool, dealt: tuple[float, float] | None = None) -> None:
        """Close one optimizer step. `keep` False: it belongs to no window (a tail, or the allocation is switching).

        dealt   samples of this rank's share and what they cost, in samples of mean cost, where that is known
        """
        self.timer.step_done()
        index, self._step_index = self._step_index, self._step_index + 1
        with self._lock:
            measured, self._open = self._open, []
        if keep:
            self.steps += 1
            self._late[index] = first_of_epoch, dealt or (math.nan, math.nan)
        if index % READ_EVERY == 0:
            self._read_times()
        if not keep:
            return
        squares: dict[str, dict[int, list[Value]]] = {"local_sq": {}, "global_sq": {}}
        others: dict[str, list[tuple[Value, float]]] = {}
        # By part, not by arrival: reductions end in any order, and a sum must not depend on it.
        for name, part, value, weight in sorted(measured, key=lambda entry: entry[1]):
            if name in squares:
                squares[name].setdefault(part, []).append(value)
            else:
                others.setdefault(name, []).append((value, weight))
        of_step = _squares(squares["local_sq"], squares["global_sq"])
        of_step |= {name: _mean(values) for name, values in others.items()}
        for name, value in of_step.items():
            series = self._kept.setdefault(name, [])
            series.append(value)
            del series[: -self.limit]

    @property
    def all_steps(self) -> int:
        """Optimizer steps since this recorder was made."""
        return self._step_index

    def _read_times(self) -> None:
        for times in self.timer.take():
            if times.step in self._late:
                first, dealt = self._late.pop(times.step)
                measured = self._measured(times, first)
                self._times.append(measured)
                self._dealt.append(dealt)
                parts = (times.compute, times.comm, measured.data)
                self._whole_s.append(sum(part for part in parts if math.isfinite(part)))
        del self._times[: -self.limit], self._whole_s[: -self.limit], self._dealt[: -self.limit]

    def _without_pause(self) -> list[StepTimes]:
        """The window's times; all NaN in a step in which this worker, or one that it had to wait for, paused."""
        times, paused = list(self._times), pause_in(self._whole_s, self._recent_s)
        self._recent_s.extend(self._whole_s)
        if paused is not None:
            self.pauses += 1
            nan = float("nan")
            times[paused] = StepTimes(times[paused].step, nan, nan, nan, nan)
            self._dealt[paused] = nan, nan
        return times

    def row(
        self,
        *,
        issued: int,
        count: float,
        weight: float,
        epoch: int = 0,
        crossed: int = 0,
        held: Sequence[float] | None = None,
    ) -> Floats:
        """Close the window: this rank's row, length len(ROW) + steps kept, the tail being comm seconds step by step.

        count, weight    this rank's samples and part of a round; where costs are known, of the mean round instead
        epoch, crossed   of the window's last round, and backward passes that have crossed ranks so far: alike on all
        held             the fields of `HELD`; None where there are no other ranks
        """
        self._read_times()
        self._windows += 1
        times = self._without_pause()
        samples, work = (_mean_std([dealt[i] for dealt in self._dealt])[0] for i in (0, 1))
        if count and math.isfinite(samples):
            count, weight = samples, weight * samples / count
        of_window = {"count": count, "weight": weight, "measured_in": float(self._windows)}
        stats, measured = self._collect(of_window)
        known: dict[str, float] = {"issued": issued, "work": work, **of_window, **measured}
        known |= {"epoch": epoch, "crossed": crossed}
        known["compute"], known["compute_std"] = _mean_std([t.compute for t in times])
        known["data"] = _mean_std([t.data for t in times])[0]
        for series, field in _SUMMED.items():
            known[field] = _mean_std(stats.get(series, ()))[0]
        for name in _PLAIN:
            values = stats.get(name, ())
            known[name], std = _mean_std(values)
            if name == "accuracy" and values and all(map(math.isnan, values)):
                self.reader.failed(
                    name, "no target of a whole window was a class, or a row of probabilities of classes"
                )
            if name in ("loss", "accuracy"):
                known[f"{name}_std"], known[f"{name}_change"] = std, self._change(name, known[name], std)
        now = time.monotonic()
        if now - self._sampled_at >= PROBE_EVERY_S:
            self._sampled_at = now
            self._sampled = self._of_probes()
        known.update(self._sampled)
        steps = min(self.steps, self.limit)
        comm = [t.comm for t in times][-steps:] if steps else []
        self.last = {"compute_s": known["compute"], "exchange_s": _mean_std(comm)[0], "data_s": known["data"]}
        self.last |= {name: known[name] for name in ("loss", "accuracy")}
        comm += [float("nan")] * (steps - len(comm))
        self.reset()
        row = [known.get(name, float("nan")) for name in _MEASURED]
        return np.array([*row, *(_NOTHING_HELD if held is None else held), *comm])

    def _of_probes(self) -> dict[str, float]:
        """What the probes say; one that raises is warned of, and not asked again."""
        sampled: dict[str, float] = {}
        for probe in list(self.probes):
            try:
                sampled.update(probe.sample())
            except Exception as error:
                self.probes.remove(probe)
                text = f"the {probe.name} probe failed ({error!r}): what it measures is unknown (NaN) from now on"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        return sampled

    def reset(self) -> None:
        """Forget the open window."""
        self.steps, self._times, self._whole_s, self._kept = 0, [], [], {}
        self._late.clear()
        self._dealt.clear()

    def _collect(self, of_window: dict[str, float]) -> tuple[Mapping[str, Sequence[float]], dict[str, float]]:
        """The newest statistics on the host, and which window they are of."""
        if self.device.type != "cuda":
            return cast("dict[str, list[float]]", self._kept), of_window
        if self._arriving is not None and self._arriving.event.query():
            self._arrived, self._arrived_of = self._arriving.values(), self._arriving.of_window
            self._arriving = None
        if self._arriving is None and self._kept:
            self._arriving = _Transfer(self._kept, self.device, of_window)
        return self._arrived, self._arrived_of

    def _measured(self, times: StepTimes, first_of_epoch: bool) -> StepTimes:
        """Without what was not measured: starting a loader's iterator is not waiting for data."""
        data = float("nan") if first_of_epoch else times.data
        return replace(times, data=data, compute=times.compute if self._sees_communication else float("nan"))

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
            self._kept[name] = [self._on_device(value) for value in series]
        self._before = {name: (pair[0], pair[1]) for name, pair in state["before"].items()}


class Unmeasured:
    """What the hook of a further model reports to: its times count, its norms are another gradient's."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.gradients_ready, self.reduced = recorder.gradients_ready, recorder.reduced

    @property
    def muted(self) -> bool:
        """Whether passes are discarded."""
        return self._recorder.muted

    def norms_due(self) -> bool:
        """Never."""
        return False

    def add(self, name: str, value: Value, *, part: int = 0) -> None:
        """Nothing."""


class _Transfer:
    """A device-to-host copy that nobody waits for."""

    def __init__(self, series: dict[str, list[Value]], device: torch.device, of_window: dict[str, float]) -> None:
        self.of_window = of_window
        self.lengths = {name: len(values) for name, values in series.items()}
        values = [v for values in series.values() for v in values]
        flat = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
        self.host = torch.empty(flat.shape, dtype=torch.float64, pin_memory=True)
        self.host.copy_(flat, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def values(self) -> dict[str, list[float]]:
        parts = torch.split(self.host, list(self.lengths.values()))
        return {name: part.tolist() for name, part in zip(self.lengths, parts, strict=True)}


def _squares(local: dict[int, list[Value]], reduced: dict[int, list[Value]]) -> dict[str, Value]:
    """|g_i|^2 and |g|^2 of an optimizer step, from squares of what went into and came out of its reductions, by bucket.

    Under DDP the k-th reduction takes x_k = R_{k-1} + l_k, what all ranks have reduced so far and this rank's new
    gradient, and gives R_k. The last R is g. The ranks' scatter is that of the x, so |g_i|^2 is estimated without bias
    by |R_last|^2 + (reductions / those seen) * sum (|x_k|^2 - |R_k|^2); with one reduction it is |x_1|^2 itself. Where
    the loss carries the weight only x_1 tells l, since R has another weight; `local` then holds it alone.
    """
    of_step: dict[str, Value] = {}
    if reduced:
        of_step["global_sq"] = _sum([values[-1] for values in reduced.values()])
    if local and all(len(values) == 1 for values in (*local.values(), *reduced.values())):
        of_step["local_sq"] = _sum([values[0] for values in local.values()])
    elif local and local.keys() == reduced.keys():
        parts: list[Value] = []
        for part, values in local.items():
            after = reduced[part]
            apart = _sum([x - r for x, r in zip(values, after, strict=False)])
            parts.append(after[-1] + apart * (len(after) / len(values)))
        of_step["local_sq"] = _sum(parts)
    return of_step


def _mean(weighted: list[tuple[Value, float]]) -> Value:
    values: list[Value] = [value for value, _ in weighted]
    if len({weight for _, weight in weighted}) == 1:  # so that a single value stays what it is
        return _sum(values) / len(values)
    return _sum([value * weight for value, weight in weighted]) / sum(weight for _, weight in weighted)


def _sum(values: list[Value]) -> Value:
    return sum(values[1:], values[0])


def assemble(
    rows: Floats, *, noise_scale: NoiseScale, sizes: Any, tells_noise: bool = True, **cluster: float
) -> Window:
    """The `Window` of W rows, shape (W, len(ROW) + steps); updates `noise_scale` with what the window tells of it."""
    columns = {name: rows[:, i] for i, name in enumerate(_MEASURED)}
    wait, transfer = attribute_wait(rows[:, len(ROW) :].T)
    global_seen = columns["global_norm_sq"][np.isfinite(columns["global_norm_sq"])]
    global_sq = float(global_seen.mean()) if global_seen.size else float("nan")
    alone = np.isfinite(columns["pair_noise"]) & np.isfinite(columns["pair_signal"])
    if alone.any():  # from gradients of one worker each
        noise, signal = (float(columns[name][alone].mean()) for name in ("pair_noise", "pair_signal"))
    else:
        # The weight is this rank's part of the mean gradient, n_i/N, whichever side applied it.
        # On CUDA ranks may hold statistics of different windows; those do not go together.
        together = columns["measured_in"] == columns["measured_in"][0]
        usable = (columns["count"] > 0) & together.all()
        local = np.where(usable, columns["gradient_norm_sq"], np.nan)
        noise, signal = NoiseScale.estimate(local, global_sq, columns["count"], columns["weight"])
    if tells_noise:
        noise_scale.update(noise, signal)
    known = {name: columns[name] for name in _MEASURED if name in PER_WORKER and name != "batch_size"}
    known |= {"wait": wait, "communication": transfer}
    cluster |= {"steps": rows.shape[1] - len(ROW), "global_norm_sq": global_sq}
    return Window.of(sizes, **known, **cluster, noise=noise_scale.noise, signal=noise_scale.signal)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample deviation of what is finite. A window is a few steps: plain Python is ten times faster there."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return float("nan"), float("nan")
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return mean, float("nan")
    return mean, math.sqrt(math.fsum((v - mean) * (v - mean) for v in known) / (len(known) - 1))
