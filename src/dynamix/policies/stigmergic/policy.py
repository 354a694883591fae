"""Every worker sets its own batch size, from its own metrics and the traces in one field. There is no arbiter.

The idea is S-MADRL's (arXiv 2510.03592): no messages, only traces, and one rule for all. The rule, its traces, which
last for one window, and its parameters are ours. The parameters are learned in simulation
(`dynamix_lab.training.stigmergic`).

Every worker learns its own costs, alpha + beta b, and leaves two figures for the crowd: the loads it computes in the
time of a step, and those it would compute in the time of its fixed costs. From the means of both every worker computes
when all could finish together, at any load of the crowd. So each finds its own size alone. It also finds the load of
highest goodput, from the noise and the exposed exchange in the traces. No worker knows the times or costs of another.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dynamix.errors import PolicyFileError
from dynamix.model.measured import mean_of_known
from dynamix.policies.files import read_policy, retrain, write_policy
from dynamix.policies.stigmergic.crowd import Crowd, Smell
from dynamix.policies.stigmergic.traces import Own, TraceKind
from dynamix.policies.stigmergic.worker import Habit, Sense
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

KIND = "stigmergic"
PRETRAINED = Path(__file__).parents[1] / "pretrained" / "stigmergic.safetensors"
LEAP = 1.5  # largest log change of a size in one decision
FAINTEST = 2e-3  # smallest trace of a high power: there is always a last worker
LARGEST = 60.0  # largest trace of a worker, so that one wrong measurement does not drown all others
LOUDEST = 4.0  # the same for its parts of |g|^2, relative to the mean; a single worker's may be negative
KEENNESS = 40  # power of the share of a step that separates the last to finish from the others
HEAVINESS = 12  # the same for the worker whose smallest size takes longest
SLIGHTEST = 1e-3  # smallest load that a worker aims at; it gets its own lower bound
RARE, MOST = 0.05, 1.0  # slowdowns a window, in logs: the least that a worker prepares for, and the most
# Further keys in states of 0.2; they identify these states as stigmergic.
OF_0_2 = ("smelt", "way", "common", "target", "windows", "field", "worlds")


def _number(default: float, low: float, high: float) -> Any:
    """A number set by hand, and the range in which training may choose it."""
    return dataclasses.field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True)
class Parameters:
    """The rule's numbers. The defaults were set by hand; the shipped ones are learned, except `kin` and `wary`."""

    # Part of a deviation that is corrected: `calm` within the own jitter, `sure` far beyond it, half way at `gate`
    # standard errors. A correction upwards is multiplied by `eager`: a late worker delays all, an early one none.
    calm: float = _number(0.3, 0.02, 1.0)
    sure: float = _number(1.0, 0.4, 1.2)
    eager: float = _number(0.5, 0.1, 1.2)
    gate: float = _number(3.0, 0.3, 16.0)
    hedge: float = _number(0.8, 0.0, 2.0)  # a worker counts as slower by this many standard deviations of its step
    # A fast worker counts as slower by this many times the log by which it usually slows down in a window.
    wary: float = _number(10.0, 0.0, 16.0)
    push: float = _number(1.0, 0.0, 1.2)  # part of the way to the crowd's best load covered by one decision
    reach: float = _number(0.6, 0.05, 0.8)  # largest common move
    # How far beyond the load in force, in logs, the load that the crowd wants counts as reached: sizes lag behind.
    ahead: float = _number(0.05, 0.0, 0.5)
    # Cost in log goodput of half the squared log load: a pull towards the base batch.
    price: float = _number(0.03, 0.002, 0.3)
    heed: float = _number(0.4, 0.1, 1.0)  # weight of a window's noise in its running estimate
    still: float = _number(0.01, 0.0, 0.06)  # smaller log changes of a size are skipped
    kin: float = _number(10.0, 0.0, 30.0)  # strength of the prior that the own fixed costs are like the crowd's
    alarm: float = _number(4.0, 0.5, 10.0)  # how strongly an out-of-memory trace reduces common moves upwards


RANGES: dict[str, tuple[float, float]] = {f.name: f.metadata["range"] for f in dataclasses.fields(Parameters)}


class StigmergicPolicy:
    """The rule. If a job has several ranks, each holds one and decides for itself (`runtime.decide.peer_channel`).

    `decide` runs all W workers of a cluster, or of C clusters, in one process: for simulators and jobs of one rank.
    Its work per worker does not depend on W.

    parameters   None: those set by hand; `pretrained()` has the learned ones
    shared       False: every worker has its own field, so none sees another's traces (an ablation)

    >>> policy, sizes = StigmergicPolicy(), np.array([64, 64])
    >>> for _ in range(16):
    ...     seconds = np.array([0.1, 0.0]) + np.array([1e-3, 4e-3]) * sizes
    ...     wait = seconds.max() - seconds
    ...     known = {"compute": seconds, "compute_std": 1e-4, "wait": wait, "communication": 0.0}
    ...     window = Window.of(sizes, steps=5, base_batch=128, **known)
    ...     sizes = policy.decide(window, Bounds.of(2))
    >>> seconds.round(2).tolist()                                             # 0.16 and 0.26 at the start
    [0.18, 0.18]
    """

    boundary: Literal["window", "epoch"] = "window"

    def __init__(self, parameters: Parameters | None = None, *, shared: bool = True, about: Any = None) -> None:
        self.parameters = parameters or Parameters()
        self.shared, self.about = shared, dict(about or {})
        self.habit, self.crowd = Habit(), Crowd(self.parameters.heed)
        self.target: Floats = np.full(1, np.nan)  # log of the crowd's best load in the last decision

    def observe(self, own: Own) -> tuple[Sense, Floats]:
        """Take in a window; returns the workers' view of it, and the traces they leave in the field, (..., W, 14)."""
        p = self.parameters
        sense = self.habit.observe(own)
        slower = (1.0 + p.hedge * sense.jitter) * np.exp(np.clip(p.wary * (sense.risk - RARE), 0.0, MOST))
        pace_s, load = sense.pace_s * slower, np.minimum(own.load, LARGEST)
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = self.habit.step / pace_s
        # A worker that was never measured counts as one that just finishes in time.
        known = np.isfinite(speed)
        speed = np.where(known, np.minimum(speed, LARGEST), load)
        offset = np.where(known, np.minimum(sense.offset, LARGEST), 0.0)
        left = np.zeros((*own.size.shape, len(TraceKind)))
        left[..., TraceKind.PRESENT], left[..., TraceKind.LOAD], left[..., TraceKind.OFFSET] = 1.0, load, offset
        left[..., TraceKind.SPEED] = np.where(self.habit.pinned, 0.0, speed)
        left[..., TraceKind.HELD] = np.where(self.habit.pinned, np.minimum(load + offset, LARGEST), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            last, before = sense.share, self.crowd.last
            before = before if before.shape in (last.shape, (*last.shape[:-1], 1)) else last
            quickest = (self.habit.least / own.unit + sense.offset) * sense.pace_s / self.habit.step
            quickest = np.clip(np.where(known, quickest, 0.0), 0.0, 1.25)
            late = np.minimum((last / before) ** KEENNESS, LARGEST)
            heavy = np.minimum((quickest / before) ** HEAVINESS, 0.8 * LARGEST)
        left[..., TraceKind.LATE] = np.where(np.isnan(late), 0.0, np.maximum(late, FAINTEST))
        left[..., TraceKind.WAIT] = left[..., TraceKind.LATE] * np.nan_to_num(1.0 - last)
        left[..., TraceKind.HEAVY] = np.nan_to_num(heavy)
        left[..., TraceKind.FLOOR] = left[..., TraceKind.HEAVY] * np.nan_to_num(quickest)
        left[..., TraceKind.NOISE] = np.nan_to_num(np.clip(own.noise, -LOUDEST, LOUDEST))
        heard = np.clip(own.square, -LOUDEST, LOUDEST)
        left[..., TraceKind.HEARD] = np.where(np.isfinite(own.noise), heard, 0.0)
        aim = self.target if self.target.shape in (last.shape, (*last.shape[:-1], 1)) else np.full(1, np.nan)
        left[..., TraceKind.AIM], left[..., TraceKind.AIMING] = np.nan_to_num(aim), np.isfinite(aim)
        left[..., TraceKind.OOM] = own.size > own.fits  # until the own size fits
        return dataclasses.replace(sense, pace_s=pace_s, offset=offset), left

    def choose(self, own: Own, sense: Sense, traces: Floats, bounds: Bounds) -> Ints:
        """The workers' new sizes (..., W) from the traces that all left in the last window, (..., 1 or W, 14).

        If the traces are unknown, the size stays. `bounds` are these workers' own; bounds on their sum are ignored.
        """
        q = bounds.quantum
        intended = self.habit.intended(own.size, q)
        move, aim = self._moves(own, sense, self.crowd.read(traces), intended / own.unit)
        move = np.clip(move, -LEAP, LEAP)
        low, high = np.maximum(bounds.low, np.minimum(q, bounds.high)), bounds.high
        high = np.maximum(np.minimum(high, np.floor(own.fits / q) * q), low)
        self.habit.pinned, self.habit.least = (aim * own.unit > high) | (aim * own.unit < low), low
        wish = np.where(np.isfinite(move), intended * np.exp(np.nan_to_num(move)), own.size)
        if np.isfinite(bounds.max_change):
            low = np.maximum(low, np.minimum(np.ceil(own.size / bounds.max_change / q) * q, own.size - q))
            most = np.maximum(np.floor(own.size * bounds.max_change / q) * q, own.size + q)
            high = np.maximum(np.minimum(high, most), low)
        self.habit.wish = np.clip(wish, low, high)
        sizes = np.clip(np.rint(self.habit.wish / q) * q, low, high)
        slight = (np.abs(np.nan_to_num(move)) < self.parameters.still) & (own.size >= low) & (own.size <= high)
        sizes = np.where(slight & (own.size % q == 0), own.size, sizes)
        sizes = np.where(np.isfinite(move), sizes, np.clip(own.size, low, high))
        return np.asarray(np.where(own.size > 0, sizes, bounds.low), dtype=np.int64)

    def _moves(self, own: Own, sense: Sense, smell: Smell, load: Floats) -> tuple[Floats, Floats]:
        """Each worker's log change from `load` and the load it aims at, (..., W); NaN if the traces are unknown."""
        p = self.parameters
        self.habit.costs = self.habit.costs.lean_to(np.maximum(smell.fixed, 0.0)[..., None], p.kin)
        step, present = self.habit.step, smell.load
        step = step if present.shape == own.size.shape else mean_of_known(step)[..., None]
        best, free = self.crowd.best_move(
            smell, load=present, seconds=step, steps=own.steps[..., :1], reach=p.reach, price=p.price, ahead=p.ahead
        )
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = np.minimum(p.push * best, free)
            found = np.where(found > 0, found * np.exp(-p.alarm * smell.oom), found)
            # If this worker's target differed from the mean of all a window before, the error is its own: take it back.
            slip = 0.0 if self.target.shape != found.shape else np.nan_to_num(self.target - smell.aim)
            self.target = np.log(present) + found
            common = np.clip(found - slip, -p.reach, np.maximum(free, 0.0))
            common = np.where(np.isnan(present), np.nan, common)
            now, then = (step * smell.finish(x) for x in (present, present * np.exp(common)))
            even, aim = (np.maximum(at / sense.pace_s - sense.offset, SLIGHTEST) for at in (now, then))
            deviation = np.log(even / load)
            doubt = np.square(deviation) / (np.square(sense.jitter) / np.fmax(own.steps, 1.0))
            gain = p.calm + (p.sure - p.calm) * doubt / (doubt + p.gate**2)
            gain = np.where(deviation > 0, p.eager * gain, gain)
            return gain * deviation + np.log(aim / even), aim

    def peers(self) -> StigmergicPolicy:
        """The rule of one worker, for a job in which each rank decides for itself."""
        return self

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        own = Own.of(window)
        sense, left = self.observe(own)
        sizes = self.choose(own, sense, left.sum(-2, keepdims=True) if self.shared else left, bounds)
        return in_range(sizes, bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        parts = {"habit": self.habit.state_dict(), "crowd": self.crowd.state_dict()}
        return {**parts, **dict.fromkeys(OF_0_2), "target": self.target.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.habit.load_state_dict(state["habit"])
        self.crowd.load_state_dict(state["crowd"])
        self.target = np.asarray(state["target"])

    def save(self, path: str | Path) -> None:
        """Write `path` (safetensors) and its description next to it (`.json`)."""
        named = dataclasses.asdict(self.parameters)
        weights = {"parameters": torch.tensor(list(named.values()), dtype=torch.float64)}
        write_policy(path, KIND, weights, {**self.about, "parameters": named})

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> StigmergicPolicy:
        """The policy in a file written by `save`. Raises `PolicyFileError` if it cannot be trusted."""
        about, weights = read_policy(path, KIND)
        given, values = about.get("parameters"), weights.get("parameters", torch.empty(0))
        named: dict[str, float] = {}
        if isinstance(given, dict) and values.ndim == 1 and list(given.values()) == values.tolist():
            named = {"wary": 0.0, "ahead": 0.0, **given}  # in the order of the values; older versions lacked both
            named = {name: named[name] for name in RANGES if name in named}  # and had some that no longer exist
        if named.keys() != RANGES.keys():
            allowed = f"a number for each of {', '.join(RANGES)} in {path}"
            raise PolicyFileError("parameters", ", ".join(named) or "none", allowed, retrain(KIND))
        parameters = Parameters(**named)
        for name, (low, high) in RANGES.items():
            if not low <= (value := getattr(parameters, name)) <= high:
                raise PolicyFileError(name, value, f"{low} to {high} in {path}", "copy both files again")
        return cls(parameters, about=about, **options)


def in_range(sizes: Ints, bounds: Bounds, *, current: Ints) -> Ints:
    """`sizes`, each worker's own choice, if their sums are allowed; else the nearest sizes that are.

    >>> in_range(np.array([40, 40]), Bounds.of(2, 1, 64, total_high=64), current=np.array([32, 32])).tolist()
    [32, 32]
    """
    total = sizes.sum(-1)
    if bool(((total >= bounds.total_low) & (total <= bounds.total_high)).all()):
        return sizes
    return project(sizes, bounds, current=current)


def pretrained(**options: Any) -> StigmergicPolicy:
    """The policy shipped as `stigmergic`; `path=` names another file."""
    return StigmergicPolicy.load(options.pop("path", PRETRAINED), **options)
