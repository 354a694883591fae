"""Every worker sets its own batch size from its own metrics and the traces that all leave in one field. No arbiter.

The idea is S-MADRL's (arXiv 2510.03592): no messages, decaying traces, one rule for all. The rule, its traces and its
parameters are ours; the parameters are learned in simulation (`dynamix_lab.training.stigmergic`).

Every worker learns its own costs, alpha + beta b, and leaves what the crowd needs of them: the loads it computes in the
time of a step, and those its fixed costs would take. The means of both tell every worker when all could finish
together, at the crowd's present load and at any other, so each finds its own size alone, and the best load of the
crowd: the one of highest goodput, by the noise and the exposed exchange that traces tell. Nobody knows anybody's times
or costs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dynamix.errors import PolicyFileError, StateError
from dynamix.model.measured import mean_of_known
from dynamix.model.state import UNKNOWN
from dynamix.policies.files import read_policy, retrain, write_policy
from dynamix.policies.stigmergic.crowd import Crowd, Smell
from dynamix.policies.stigmergic.traces import Own, TraceKind
from dynamix.policies.stigmergic.worker import Habit, Sense
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

KIND = "stigmergic"
PRETRAINED = Path(__file__).parents[1] / "pretrained" / "stigmergic.safetensors"
LEAP = 1.5  # largest log change of a size in one decision
FAINTEST = 2e-3  # least that is left of a high power: somebody is always the last
LARGEST = 60.0  # that a worker leaves, so that one wrong measurement does not drown all others
LOUDEST = 4.0  # the same for its parts of |g|^2, over a mean one; one worker's may be negative
KEENNESS = 40  # power of the share of a step that tells the last to finish from the others
HEAVINESS = 12  # the same for the one whose smallest size takes longest
SLIGHTEST = 1e-3  # smallest load that a worker aims at; what it gets is its own lower bound
_OF_0_2 = ("field", "worlds")  # which states held, too, and by which they are told from other policies'


def _number(default: float, low: float, high: float) -> Any:
    """A number set by hand, and the range from which training may choose."""
    return dataclasses.field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True)
class Parameters:
    """The rule's numbers. The defaults were set by hand; the shipped ones are learned."""

    fade: float = _number(0.8, 0.3, 0.98)  # part of every trace that is gone a window later
    # Part of a deviation that is made up for: `calm` within the own jitter, `sure` far beyond, half way at `gate`
    # standard errors; `eager` times that if it asks for more: who is late makes all wait, who could do more nobody.
    calm: float = _number(0.3, 0.02, 1.0)
    sure: float = _number(1.0, 0.4, 1.2)
    eager: float = _number(0.5, 0.1, 1.2)
    gate: float = _number(3.0, 0.3, 16.0)
    back: float = _number(0.5, 0.05, 1.2)  # least part of a share that is taken back if it was given up for a stall
    hedge: float = _number(0.8, 0.0, 2.0)  # a worker counts as slower by so many standard deviations of its step
    damp: float = _number(0.5, 0.0, 10.0)  # how much less is made up for while the crowd both grows and shrinks
    push: float = _number(1.0, 0.0, 1.2)  # part of the way to the crowd's best load that is gone in one decision
    reach: float = _number(0.6, 0.05, 0.8)  # largest common move
    # How far beyond the load in force, in logs, the load that the crowd wants counts as met: sizes lag behind wishes.
    ahead: float = _number(0.05, 0.0, 0.5)
    # What a log of the load costs in log goodput, squared and halved: a pull towards the base batch.
    price: float = _number(0.03, 0.002, 0.3)
    heed: float = _number(0.4, 0.1, 1.0)  # weight of a window's noise in what is believed of it
    still: float = _number(0.01, 0.0, 0.06)  # smaller log changes of a size are not made
    kin: float = _number(10.0, 0.0, 30.0)  # how firmly the own fixed costs are believed to be like the crowd's
    alarm: float = _number(4.0, 0.5, 10.0)  # how strongly an out-of-memory trace holds back the common move upwards


RANGES: dict[str, tuple[float, float]] = {f.name: f.metadata["range"] for f in dataclasses.fields(Parameters)}


class StigmergicPolicy:
    """The rule. If a job has several ranks, each holds one and decides for itself (`runtime.decide.peer_channel`).

    `decide` plays all W workers of a cluster, or of C clusters, in one process: for simulators and jobs of one rank.
    Its work per worker does not depend on W.

    parameters   None: those set by hand; `pretrained()` has the learned ones
    shared       False: every worker has a field of its own, so nobody sees another's traces (an ablation)

    >>> policy, sizes = StigmergicPolicy(), np.array([64, 64])
    >>> for _ in range(12):
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
        self.habit, self.windows = Habit(), 0
        self.crowd = Crowd(self.parameters.heed)
        self._smelt: Floats = UNKNOWN  # the field after the last window, (..., 16); nothing before the first
        self.way: Floats = UNKNOWN  # what was left about the last move, (..., 16); the field takes it in with the next
        self.target: Floats = np.full(1, np.nan)  # log of the crowd's load that was found best in the last decision
        self.common: Floats = np.zeros(1)  # log move that all made alike in the last decision

    def observe(self, own: Own) -> tuple[Sense, Floats]:
        """Take in a window: what the workers make of it, and what they leave in the field, (..., W, 16)."""
        p = self.parameters
        sense = self.habit.observe(own)
        pace_s, load = sense.pace_s * (1.0 + p.hedge * sense.jitter), np.minimum(own.load, LARGEST)
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = self.habit.step / pace_s
        # Who was never measured counts as one that just finishes in time.
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
        left[..., TraceKind.OOM] = own.size > own.fits  # until the own size fits
        return Sense(sense.share, sense.jitter, pace_s, offset), left

    def smell(self, left: Floats, way: Floats) -> tuple[Floats, Floats]:
        """Let the field take in what all workers left; what is smelt there, and which part of it is new, (..., 16).

        left   sum over workers of what `observe` says, (..., 16)
        way    the same of `moved` after the window before. It counts from then
        """
        self.windows += 1
        kept = 1.0 - self.parameters.fade
        before = self._smelt if self._smelt.shape == left.shape else np.zeros(left.shape)
        self._smelt = smelt = (before + way) * kept + left
        return smelt, smelt - kept * before

    def choose(self, own: Own, sense: Sense, smelt: Floats, new: Floats, bounds: Bounds) -> Ints:
        """The workers' new sizes (..., W) from what they smell, and which part of it was left in the last window, (...,
        1 or W, 16). Unknown traces: the size stays. `bounds` are these workers' own; their sum is not looked at.
        """
        q = bounds.quantum
        intended = self.habit.intended(own.size, q)
        smell = self.crowd.read(smelt, new)
        common, move, aim = self._moves(own, sense, smell, intended / own.unit)
        self.common, move = np.nan_to_num(common), np.clip(move, -LEAP, LEAP)
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

    def moved(self, before: Floats, load: Floats, sizes: Ints) -> Floats:
        """The traces that workers of this `load` leave about their way from size `before` to `sizes`, (..., W, 16).

        Only what they did beyond the move that all made alike: moves towards the pace cancel to first order, and this
        is what is left of their sum.
        """
        left = np.zeros((*before.shape, len(TraceKind)))
        change = np.maximum(sizes, 1) / np.maximum(before, 1) * np.exp(-self.common) - 1.0
        step = np.minimum(load, LARGEST) * change
        left[..., TraceKind.GROW], left[..., TraceKind.SHRINK] = np.maximum(step, 0.0), np.maximum(-step, 0.0)
        left[..., TraceKind.AIM], left[..., TraceKind.AIMING] = np.nan_to_num(self.target), np.isfinite(self.target)
        return left

    def _moves(self, own: Own, sense: Sense, smell: Smell, load: Floats) -> tuple[Floats, Floats, Floats]:
        """The log change that all make alike, (..., 1 or W), each one's whole log change from `load` and the load it
        aims at, (..., W); NaN where the traces are not known."""
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
            # What all found differed from what this worker did a window before: a slip of its own, which it takes back.
            slip = 0.0 if self.target.shape != found.shape else np.nan_to_num(self.target - smell.aim)
            self.target = np.log(present) + found
            common = np.clip(found - slip, -p.reach, np.maximum(free, 0.0))
            common = np.where(np.isnan(present), np.nan, common)
            now, then = (step * smell.finish(x) for x in (present, present * np.exp(common)))
            even, aim = (np.maximum(at / sense.pace_s - sense.offset, SLIGHTEST) for at in (now, then))
            deviation = np.log(even / load)
            doubt = np.square(deviation) / (np.square(sense.jitter) / np.fmax(own.steps, 1.0))
            gain = (p.calm + (p.sure - p.calm) * doubt / (doubt + p.gate**2)) / (1.0 + p.damp * smell.churn)
            gain = np.where(deviation > 0, p.eager * gain, gain)
            gain = np.where(self.habit.refuted & (deviation > 0), np.maximum(gain, p.back), gain)
            return common, gain * deviation + np.log(aim / even), aim

    def peers(self) -> StigmergicPolicy:
        """The rule of one worker, for a job in which each rank decides for itself."""
        return self

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        own = Own.of(window)
        sense, left = self.observe(own)
        left = left.sum(-2) if self.shared else left
        smelt, new = self.smell(left, self.way if self.way.shape == left.shape else np.zeros(left.shape))
        if self.shared:
            smelt, new = smelt[..., None, :], new[..., None, :]
        sizes = in_range(self.choose(own, sense, smelt, new, bounds), bounds, current=window.batch_size)
        self.go(own, sizes)
        return sizes

    def go(self, own: Own, sizes: Ints) -> None:
        """The sizes become `sizes` (..., W): the field takes in with the next window what is left about that."""
        moved = self.moved(own.size, own.load, sizes)
        self.way = moved.sum(-2) if self.shared else moved

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: value.tolist() for name, value in self._arrays().items()}
        parts = {"habit": self.habit.state_dict(), "crowd": self.crowd.state_dict()}
        return {**parts, **arrays, "windows": self.windows, **dict.fromkeys(_OF_0_2)}

    def _arrays(self) -> dict[str, Floats]:
        return {"smelt": self._smelt, "way": self.way, "common": self.common, "target": self.target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.habit.load_state_dict(state["habit"])
        self.crowd.load_state_dict(state["crowd"])
        self._smelt, self.way, self.common, self.target = (np.asarray(state[name]) for name in self._arrays())
        self.windows = int(state["windows"])
        if self._smelt.size and self._smelt.shape[-1] != len(TraceKind):
            raise StateError(f"the saved field has {self._smelt.shape[-1]} traces, this one {len(TraceKind)}")

    def save(self, path: str | Path) -> None:
        """Write `path` (safetensors) and its description beside it (`.json`)."""
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
            named = dict(given)  # in the order of the values
        if RANGES.keys() - named.keys() == {"back", "ahead"}:  # of a version that had the two fixed
            named |= {"back": min(named["sure"], 1.0), "ahead": 0.0}
        if named.keys() != RANGES.keys():
            allowed = f"a number for each of {', '.join(RANGES)} in {path}"
            raise PolicyFileError("parameters", ", ".join(named) or "none", allowed, retrain(KIND))
        parameters = Parameters(**named)
        for name, (low, high) in RANGES.items():
            if not low <= (value := getattr(parameters, name)) <= high:
                raise PolicyFileError(name, value, f"{low} to {high} in {path}", "copy both files again")
        return cls(parameters, about=about, **options)


def in_range(sizes: Ints, bounds: Bounds, *, current: Ints) -> Ints:
    """`sizes`, every worker's own choice, if their sums are allowed too; else the nearest that are.

    >>> in_range(np.array([40, 40]), Bounds.of(2, 1, 64, total_high=64), current=np.array([32, 32])).tolist()
    [32, 32]
    """
    total = sizes.sum(-1)
    if bool(((total >= bounds.total_low) & (total <= bounds.total_high)).all()):
        return sizes
    return project(sizes, bounds, current=current)


def pretrained(**options: Any) -> StigmergicPolicy:
    """The policy that ships as `stigmergic`; `path=` names another file."""
    return StigmergicPolicy.load(options.pop("path", PRETRAINED), **options)
