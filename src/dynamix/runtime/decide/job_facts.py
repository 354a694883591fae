"""The facts of a job that every rank holds: what its windows are measured by, and what its allocations must satisfy."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from dynamix.errors import ConfigError
from dynamix.model.rounds import RoundSize
from dynamix.model.ways import Ways
from dynamix.runtime.check.losses import WeightTest
from dynamix.runtime.check.parting import Parting
from dynamix.runtime.decide.channel import Kind, Message
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.window import Bounds, Floats, Ints, Window


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """The window being decided on, as every rank knows it."""

    window_index: int
    sizes: Ints  # the allocation in force while it was open, samples per round
    consumed: int  # rounds done when it closed
    issued: int  # rounds this rank's sampler had begun to issue by then
    age: float  # rounds since `sizes` came into force
    step: int  # optimizer steps done
    samples: int
    rate: float = 1.0  # this rank's learning rate over its largest so far
    payload: float = 1.0  # bytes that a meeting over parameters moves, over those of a gradient
    piece: int = 0  # samples of a worker's own step, where workers stepped apart because the allocation said so
    comparable: bool = False  # the workers' batches are drawn alike, so that their losses can be compared


@dataclass
class JobFacts:
    """What every rank of a job holds; they change only at moments on which the ranks agree."""

    bounds: Bounds  # what batch sizes are kept within, samples per round, on a grid that pieces divide
    base_batch: int  # samples per round of all workers at the start (B0)
    accumulate: int = 1  # pieces of a round: micro-batches per optimizer step
    slack: int = 0  # rounds that may still be issued under the old allocation after a window closed
    fixed: bool = False  # the global batch stays at `base_batch`
    rounds: RoundSize | Ways | None = None  # chooses it where workers step apart, and whether they do
    hosts: tuple[str, ...] = ()  # of every rank; empty where they are not known
    shares: dict[str, float] = field(default_factory=dict)  # of workers that were here, relative (`hosts.remembered`)
    # Smoothed over windows, where this rank learns of it: the one that decides, or all if each does.
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    weight_test: WeightTest | None = None  # None: losses tell nothing of their weights
    parting: Parting = field(default_factory=Parting)
    unlike: str | None = None  # what ranks were seen to do that others did not, where this rank learns of it
    closing: ClosedWindow = field(init=False)  # the newest window that closed

    def __post_init__(self) -> None:
        self.closing = self._none_closed()

    def _none_closed(self, step: int = 0, samples: int = 0) -> ClosedWindow:
        return ClosedWindow(0, self.bounds.low, 0, 0, 0.0, step, samples)

    def look(self, held: Floats, unlike: str | None = None) -> None:
        """Take into account what all ranks' rows say of what they hold alike, (W, n), and did unlike others."""
        self.parting.look(held)
        self.unlike = self.unlike or unlike or self.parting.wrong

    def bounds_after(self, window: Window, closing: ClosedWindow) -> Bounds:
        """What the answer to `window` is kept within, where workers meet in one way."""
        return (
            self.rounds.within(self.bounds, window, closing.rate) if isinstance(self.rounds, RoundSize) else self.bounds
        )

    def bounds_of(self, piece: int, bounds: Bounds | None = None) -> Bounds:
        """What rounds are kept within in which workers step apart by so many samples; 0: over gradients.

        bounds   of rounds over gradients, if they are not the job's
        """
        return self.rounds.apart_bounds(piece) if piece and isinstance(self.rounds, Ways) else bounds or self.bounds

    def limit_to(self, samples: int) -> None:
        """No round may outgrow a data set: every one would be a tail, and no window would ever close."""
        bounds = self.bounds
        most = max(samples // bounds.quantum * bounds.quantum, int(np.max(bounds.total_low)))
        self.bounds = dataclasses.replace(bounds, total_high=np.minimum(bounds.total_high, most))
        if self.rounds is not None:
            self.rounds.epoch = float(samples)

    def facts(self, closing: ClosedWindow) -> dict[str, float]:
        """What a `Window` says of the job itself, by field."""
        own = {"micro_batches": self.accumulate, "base_batch": self.base_batch}
        return own | {"age": closing.age, "step": closing.step}

    def keep(self, kind: Kind) -> Message:
        """The message that changes nothing."""
        return self.message(kind, self.closing.consumed, self.closing.sizes, self.closing.piece)

    def change(self, sizes: Ints, issued: int, piece: int = 0) -> Message:
        """The message that puts `sizes` (W,) in force, `issued` being the most rounds that any rank had begun."""
        return self.message(Kind.NEW, issued + self.slack, sizes, piece)

    def message(self, kind: Kind, from_step: int, sizes: Ints, piece: int = 0) -> Message:
        """A message that carries this rank's noise scale."""
        return Message(kind, from_step, self.noise_scale.noise, self.noise_scale.signal, sizes, piece=piece)

    def resume(self, base_batch: int, step: int, samples: int, shares: dict[str, float]) -> None:
        """Go on at `step` and `samples` as a job that began with `base_batch`.

        Raises `ConfigError` where a fixed one is out of bounds.
        """
        self.bounds, self.base_batch, self.shares = self.bounds_from(base_batch), base_batch, shares
        self.closing, self.parting = self._none_closed(step, samples), Parting()
        if isinstance(self.rounds, Ways):
            self.rounds = self.rounds.begun_anew()

    def bounds_from(self, base_batch: int) -> Bounds:
        """`bounds` of a job that began with `base_batch`. Raises `ConfigError` where a fixed one is out of bounds."""
        return fixed_at(self.bounds, base_batch) if self.fixed and base_batch != self.base_batch else self.bounds

    def in_pieces(self) -> Bounds:
        """`bounds` of a piece: samples of a worker per micro-batch. Their totals are the round's."""
        pieces, bounds = self.accumulate, self.bounds
        low, high = bounds.low // pieces, bounds.high // pieces
        return dataclasses.replace(bounds, low=low, high=high, quantum=bounds.quantum // pieces)


def fixed_at(bounds: Bounds, global_batch: int) -> Bounds:
    """`bounds` that allow one global batch only, samples per round. Raises `ConfigError` if they cannot.

    >>> fixed = fixed_at(Bounds.of(2, 1, 64), 96)
    >>> int(fixed.total_low), int(fixed.total_high)
    (96, 96)
    """
    least, most = int(bounds.low.sum()), int(bounds.high.sum())
    if global_batch % bounds.quantum or not least <= global_batch <= most:
        allowed = f"{least} to {most} in steps of {bounds.quantum}, by the workers' bounds"
        fix = "widen min_batch_size and max_batch_size, lower quantum, or use global_batch='adaptive'"
        raise ConfigError("global batch", global_batch, allowed, fix)
    total = np.asarray(global_batch, dtype=np.int64)
    return dataclasses.replace(bounds, total_low=total, total_high=total)
