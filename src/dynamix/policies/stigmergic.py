"""Every worker sets its own batch size from its own metrics and the traces that all leave in one field. No arbiter.

The idea is S-MADRL's (arXiv 2510.03592): no messages, decaying traces, one rule for all. The rule, its traces and its
parameters are ours; the parameters are learned in simulation (`dynamix.learning.stigmergic_training`).

A worker moves its log size by two amounts. Its own: towards the common pace, fully where its deviation is far beyond its own
jitter, hardly where it is not. And one that all make alike: up while a larger global batch is worth more than it costs, and
against the price of load. The sum of the own moves is zero to first order, because the pace is the mean over load.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dynamix.errors import PolicyFileError
from dynamix.policies.files import read_policy, write_policy
from dynamix.policies.fitting import restored, saved
from dynamix.policies.habit import Habit, Sense
from dynamix.policies.traces import GROW, LATE, LOAD, NOISE, OOM, PRESENT, SHRINK, TRACES, WAIT, Own
from dynamix.stigmergy.field import Decay, MemoryField
from dynamix.window import Bounds, Floats, Ints, Window, project

KIND = "stigmergic"
PRETRAINED = Path(__file__).parent / "pretrained" / "stigmergic.safetensors"
LEAP = 1.5  # largest log change of a size in one decision
UNIT_S = 0.1  # what log seconds are counted from: a store holds deposits of +-64
HEAVIEST = 12.0  # largest load that a worker weighs with, for the same reason


@dataclass(frozen=True, slots=True)
class Parameters:
    """The rule's numbers. The defaults were set by hand; the shipped ones are learned.

    fade       alpha of the field, per window
    calm, sure, gate   part of a deviation that is made up for: `calm` within the own jitter, `sure` far beyond, half way at `gate`
               standard errors
    hedge      a worker counts as later by so many standard deviations of its step
    damp       how much less is made up for while the crowd both grows and shrinks
    ease       share of blocked time at which half as much is made up for: where nobody waits there is nothing to win
    push       common move per worth of a larger global batch (log goodput per log batch)
    reach      largest common move
    price      pull towards the base batch, per log of the load
    settle     how much of the load that the crowd took on or let go by moving towards the pace is taken back
    belief, trust   elasticity of the own time before sizes have changed, and how firmly it is believed
    overlap    exponent on the part of a step that computing takes: more where the exchange hides behind it
    crowding   how much later than the mean the slowest of many is, in standard deviations per sqrt(log W)
    rise       exponent with which the noise scale is believed to grow with the batch
    alarm      how strongly an out-of-memory trace holds back the common move upwards
    """

    fade: float = 0.5
    calm: float = 0.3
    sure: float = 0.95
    gate: float = 3.0
    hedge: float = 0.3
    damp: float = 0.5
    ease: float = 0.01
    push: float = 1.0
    reach: float = 0.3
    price: float = 0.03
    settle: float = 1.0
    belief: float = 0.65
    trust: float = 0.02
    overlap: float = 2.0
    crowding: float = 0.7
    rise: float = 0.4
    alarm: float = 4.0


# What training may choose from.
RANGES: dict[str, tuple[float, float]] = {
    "fade": (0.05, 0.95), "calm": (0.02, 1.0), "sure": (0.4, 1.3), "gate": (0.5, 8.0), "hedge": (0.0, 2.0),
    "damp": (0.0, 10.0), "ease": (0.0, 0.3), "push": (0.1, 4.0), "reach": (0.05, 0.8), "price": (0.002, 0.3),
    "settle": (0.0, 4.0), "belief": (0.3, 1.1), "trust": (0.002, 1.0), "overlap": (0.5, 4.0), "crowding": (0.0, 2.5),
    "rise": (0.0, 0.9), "alarm": (0.5, 10.0),
}  # fmt: skip


class StigmergicPolicy:
    """The rule. In a job of several ranks each holds one and decides for itself (`dynamix.decentral`).

    `decide` plays all W workers of a cluster, or of C clusters, in one process: for simulators and jobs of one rank. What it does
    per worker does not depend on W.

    parameters   None: those set by hand; `pretrained()` has the learned ones
    decay        of the field; None: parameters.fade per window, from nothing
    shared       False: every worker has a field of its own, so nobody sees another's traces (an ablation)

    >>> policy, sizes = StigmergicPolicy(), np.array([64, 64])
    >>> for _ in range(12):
    ...     seconds = np.array([0.1, 0.0]) + np.array([1e-3, 4e-3]) * sizes
    ...     window = Window.of(sizes, compute=seconds, compute_std=1e-4, wait=seconds.max() - seconds, communication=0.0, steps=5)
    ...     sizes = policy.decide(window, Bounds.of(2))
    >>> seconds.round(2).tolist()                                             # 0.16 and 0.26 at the start
    [0.19, 0.19]
    """

    boundary: Literal["window", "epoch"] = "window"

    def __init__(
        self,
        parameters: Parameters | None = None,
        *,
        decay: Decay | None = None,
        shared: bool = True,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.parameters = parameters or Parameters()
        self.decay = decay or Decay(alpha=self.parameters.fade, beta=1.0, start=0.0)
        self.shared, self.about = shared, about or {}
        self.habit, self.windows = Habit(), 0
        self.field: MemoryField | None = None
        self.common: Floats = np.zeros(1)  # log move that all made alike in the last decision

    # ------------------------------------------------------------ one worker, or many side by side

    def observe(self, own: Own) -> tuple[Sense, Floats]:
        """Take in a window: what the workers make of it, and what they leave in the field, (..., W, 8)."""
        p = self.parameters
        sense = self.habit.observe(own, belief=p.belief, trust=p.trust)
        late = sense.busy - np.log(UNIT_S) + np.log1p(p.hedge * sense.jitter)
        slowest = np.minimum(sense.share * (1.0 + p.crowding * sense.jitter * np.sqrt(np.log(own.workers))), 1.0)
        known = np.isfinite(late)
        load = np.where(known, np.minimum(own.load, HEAVIEST), 0.0)
        left = np.zeros((*own.size.shape, len(TRACES)))
        left[..., PRESENT] = 1.0
        left[..., LOAD] = load
        left[..., LATE] = load * np.where(known, late, 0.0)
        left[..., WAIT] = load * np.nan_to_num(1.0 - sense.share, nan=1.0)  # not known: as if there were much to win
        teaches = own.noise + p.rise * (1.0 - own.noise)
        left[..., NOISE] = np.nan_to_num(teaches - sense.elasticity * slowest**p.overlap)
        left[..., OOM] = own.size > own.fits  # until the own size fits
        return Sense(late, sense.share, sense.jitter, sense.elasticity), left

    def choose(self, own: Own, sense: Sense, smelt: Floats, bounds: Bounds) -> Ints:
        """The workers' new sizes (..., W) from what they smell, (..., 1 or W, 8). Unknown traces: the size stays.

        `bounds` are these workers' own; their sum is not looked at.
        """
        common, alone = self._moves(own, sense, smelt)
        self.common, move = np.nan_to_num(common), np.clip(common + alone, -LEAP, LEAP)
        q = bounds.quantum
        low, high = np.maximum(bounds.low, np.minimum(q, bounds.high)), bounds.high
        if np.isfinite(bounds.max_change):
            low = np.maximum(low, np.minimum(np.ceil(own.size / bounds.max_change / q) * q, own.size - q))
            high = np.minimum(high, np.maximum(np.floor(own.size * bounds.max_change / q) * q, own.size + q))
        high = np.maximum(np.minimum(high, np.floor(own.fits / q) * q), low)
        wish = np.where(np.isfinite(move), self.habit.intended(own.size, q) * np.exp(np.nan_to_num(move)), own.size)
        self.habit.wish = np.clip(wish, low, high)
        sizes = np.clip(np.rint(self.habit.wish / q) * q, low, high)
        sizes = np.where(np.isfinite(move), sizes, np.clip(own.size, low, high))
        return np.asarray(np.where(own.size > 0, sizes, bounds.low), dtype=np.int64)

    def moved(self, before: Floats, load: Floats, sizes: Ints) -> Floats:
        """What workers of this `load` leave in the field about their way from size `before` to `sizes`, (..., W, 8).

        Only what they did beyond the move that all made alike: moves towards the pace cancel to first order, and this is what is
        left of their sum.
        """
        left = np.zeros((*before.shape, len(TRACES)))
        change = np.maximum(sizes, 1) / np.maximum(before, 1) * np.exp(-self.common) - 1.0
        step = np.minimum(load, HEAVIEST) * change
        left[..., GROW], left[..., SHRINK] = np.maximum(step, 0.0), np.maximum(-step, 0.0)
        return left

    def _moves(self, own: Own, sense: Sense, smelt: Floats) -> tuple[Floats, Floats | float]:
        """Log changes (..., W or 1): the one that all make alike, NaN where the traces are not known, and each one's own."""
        p = self.parameters
        with np.errstate(divide="ignore", invalid="ignore"):
            means = smelt / smelt[..., LOAD, None]
            worth, crowd = smelt[..., NOISE] / smelt[..., PRESENT], np.log(smelt[..., LOAD] / smelt[..., PRESENT])
            common = p.push * worth - p.price * crowd - p.settle * (means[..., GROW] - means[..., SHRINK])
            common = np.clip(common, -p.reach, p.reach)
            common = np.where(common > 0, common * np.exp(-p.alarm * smelt[..., OOM]), common)
            churn, waiting = np.minimum(means[..., GROW], means[..., SHRINK]), np.maximum(means[..., WAIT], 0.0)
            deviation = means[..., LATE] - sense.busy
            doubt = np.square(deviation) / (np.square(sense.jitter) / np.fmax(own.steps, 1.0))
            gain = p.calm + (p.sure - p.calm) * doubt / (doubt + p.gate**2)
            gain = gain / (1.0 + p.damp * churn) * (waiting / (waiting + p.ease + 1e-9))
            alone = np.nan_to_num(gain * deviation, posinf=0.0, neginf=0.0) if own.workers > 1 else 0.0
        return common, alone

    # ------------------------------------------------------------ all workers in one process

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        own, step = Own.of(window), self.windows
        self.windows += 1
        field, cells = self._field_of(own.size.shape), np.arange(len(TRACES))
        sense, left = self.observe(own)

        def leave(traces: Floats) -> None:
            amounts = traces.sum(-2) if self.shared else traces
            field.deposit(np.broadcast_to(cells, amounts.shape), amounts, step=step)

        leave(left)
        smelt = field.read(np.broadcast_to(cells, (*field.worlds, len(TRACES))), step=step)
        sizes = self.choose(own, sense, smelt[..., None, :] if self.shared else smelt, bounds)
        sizes = in_range(sizes, bounds, current=window.batch_size)
        leave(self.moved(own.size, own.load, sizes))
        return sizes

    def _field_of(self, shape: tuple[int, ...]) -> MemoryField:
        worlds = shape[:-1] if self.shared else shape
        if self.field is None or self.field.worlds != worlds:
            self.field = MemoryField(len(TRACES), self.decay, worlds=worlds)
        return self.field

    # ------------------------------------------------------------ state and files

    def state_dict(self) -> dict[str, Any]:
        field = None if self.field is None else {k: v.tolist() for k, v in self.field.state_dict().items()}
        worlds = None if self.field is None else list(self.field.worlds)
        return {"habit": saved(self.habit), "windows": self.windows, "field": field, "worlds": worlds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restored(self.habit, state["habit"])
        self.windows, self.field = int(state["windows"]), None
        if state["field"] is not None:
            self.field = MemoryField(len(TRACES), self.decay, worlds=tuple(state["worlds"]))
            self.field.load_state_dict(
                {"value": np.asarray(state["field"]["value"]), "stamp": np.asarray(state["field"]["stamp"])}
            )

    def save(self, path: str | Path) -> None:
        """Write `path` (safetensors) and its description beside it (`.json`)."""
        named = dataclasses.asdict(self.parameters)
        weights = {"parameters": torch.tensor(list(named.values()), dtype=torch.float64)}
        write_policy(path, KIND, weights, {**self.about, "parameters": named})

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> StigmergicPolicy:
        """The policy in a file written by `save`. Raises `PolicyFileError` if it cannot be trusted."""
        about, weights = read_policy(path, KIND)
        names = [f.name for f in dataclasses.fields(Parameters)]
        values = weights.get("parameters")
        if values is None or values.shape != (len(names),) or list(about.get("parameters", ())) != names:
            retrain = "train one for this version: dynamix policy train --policy stigmergic"
            raise PolicyFileError("parameters", str(path), f"a number for each of {', '.join(names)}", retrain)
        for name, value in zip(names, values.tolist(), strict=True):
            low, high = RANGES[name]
            if not low <= value <= high:
                raise PolicyFileError(name, value, f"{low} to {high} in {path}", "copy both files again")
        return cls(Parameters(**dict(zip(names, values.tolist(), strict=True))), about=about, **options)


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
