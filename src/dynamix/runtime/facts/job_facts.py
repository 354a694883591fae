"""The facts of a job that every rank holds: what its windows are measured by, and what its allocations must satisfy.

And what ranks tell each other of them: the window that closed, and the message that answers it.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import UsageError
from dynamix.policies.protocol import boundary
from dynamix.runtime.config import JobConfig
from dynamix.runtime.facts.beside import Told
from dynamix.runtime.facts.losses import WeightTest
from dynamix.runtime.facts.parting import Parting
from dynamix.runtime.limits import fixed_at
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.window import Bounds, Floats, Ints

HEAD = 7  # numbers of a message before its sizes


class Kind(enum.IntEnum):
    """The kinds of messages. LATE and FAILED keep the allocation; FAILED ends the job on every rank."""

    KEEP = 0
    NEW = 1
    LATE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Message:
    """The one message of a window, the same on every rank."""

    kind: Kind
    from_step: int  # round at which `sizes` come into force (NEW)
    noise: float
    signal: float
    sizes: Ints  # samples per round
    interval: int = 0  # steps of the next window; 0: as many as of this one
    piece: int = 0  # samples of a worker's own step, where workers step apart in rounds of `sizes`
    differ: bool = False  # digests of what ranks hold alike were not: all compare what they are of

    def pack(self) -> Tensor:
        head = [self.kind, self.from_step, self.noise, self.signal, self.interval, self.piece, self.differ]
        return torch.from_numpy(np.concatenate([head, self.sizes], dtype=np.float64))

    @classmethod
    def unpack(cls, packed: Tensor) -> Message:
        kind, from_step, noise, signal, interval, piece, differ = packed[:HEAD].tolist()
        sizes = packed[HEAD:].numpy().astype(np.int64)
        return cls(Kind(int(kind)), int(from_step), noise, signal, sizes, int(interval), int(piece), bool(differ))


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
    payload: float = 1.0  # bytes that a meeting over parameters moves, over those of a gradient
    piece: int = 0  # samples of a worker's own step, where workers stepped apart because the allocation said so
    comparable: bool = False  # the workers' batches are drawn alike, so that their losses can be compared


class JobFacts:
    """Facts that every rank of the job of `config` holds. They change only at moments on which the ranks agree.

    bounds       what batch sizes are kept within, samples per round, on a grid that pieces divide
    base_batch   samples per round of all workers at the start (B0)
    accumulate   pieces of a round: micro-batches per optimizer step
    slack        rounds that may still be issued under the old allocation after a window closed; None: a live job's
    ahead        rounds that a simulated loader has issued beyond those that its sampler has
    fixed        the global batch stays at `base_batch`
    may_fall     it begins with the least that it may be, and nobody said so: what memory holds may be less
    sync_schedule   chooses how workers meet
    piece        most samples of a piece, as the user said; a rank's memory may hold less
    per_epoch    a window is an epoch
    hosts        of every rank; empty where they are not known
    shares       of workers that were here, relative (`hosts.remembered`)
    noise_scale  smoothed over windows, where this rank learns of it: the one that decides, or all if each does
    weight_test  None: losses tell nothing of their weights
    unlike       what ranks were seen to do that others did not, where this rank learns of it
    closing      the newest window that closed
    at_once      samples of the steps that all workers took at the same time at the start
    """

    def __init__(
        self, config: JobConfig, *, hosts: tuple[str, ...] = (), slack: int | None = None, ahead: int = 0
    ) -> None:
        self.bounds, self.base_batch, self.accumulate = config.bounds, config.base_batch, config.accumulate
        self.slack, self.ahead = config.slack if slack is None else slack, ahead
        self.may_fall = not config.fixed and config.limits.min_global_batch is None
        self.fixed, self.piece, self.sync_schedule = config.fixed, config.micro_batch, config.sync_schedule()
        self.per_epoch = boundary(config.own_policy) == "epoch"
        self.hosts, self.shares = hosts, dict[str, float]()
        self.noise_scale, self.parting = NoiseScale(), Parting()
        self.weight_test: WeightTest | None = None
        self.unlike: str | None = None
        self.closing, self.at_once = self._none_closed(), self.sync_schedule.at_once(self.base_batch, config.workers)

    def _none_closed(self, step: int = 0, samples: int = 0) -> ClosedWindow:
        return ClosedWindow(0, self.bounds.low, 0, 0, 0.0, step, samples)

    def window_closed(self, closing: ClosedWindow) -> None:
        """A window closed."""
        self.closing = closing

    def test_weights(self, test: WeightTest) -> None:
        """Losses are to be compared with shares, by `test`."""
        self.weight_test = test

    def tell_beside(self, told: Told) -> None:
        """The loop has trained samples that it was not dealt."""
        self.parting.tell_beside(told)

    def narrow(self, bounds: Bounds) -> None:
        """Sizes are kept within `bounds` from now on."""
        self.bounds = bounds

    def decide_per_epoch(self) -> None:
        """Make windows epochs from now on: nothing is issued under an old allocation after one closed."""
        self.per_epoch, self.slack = True, 0

    def require_right(self) -> None:
        """Raise `UsageError` where ranks were seen to do what others did not, or losses to carry other weights."""
        of_weights = None if self.weight_test is None else self.weight_test.wrong
        if wrong := of_weights or self.unlike:
            raise UsageError(wrong)

    def facts_alike(self) -> dict[str, Any]:
        """Facts that every rank must hold alike, by name."""
        bounds = self.bounds
        known: dict[str, Any] = {"min_batch_size": bounds.low, "max_batch_size": bounds.high, "quantum": bounds.quantum}
        known |= {"min_global_batch": bounds.total_low, "max_global_batch": bounds.total_high}
        return known | {"base batch": self.base_batch, "decides once per epoch": self.per_epoch, "slack": self.slack}

    def look(self, held: Floats, unlike: str | None = None) -> None:
        """Take into account what all ranks' rows say of what they hold alike, (W, n), and did unlike others."""
        self.parting.look(held)
        self.unlike = self.unlike or unlike or self.parting.wrong

    def limit_to(self, samples: int) -> None:
        """No round may outgrow a data set: every one would be a tail, and no window would ever close."""
        bounds = self.bounds
        most = max(samples // bounds.quantum * bounds.quantum, int(np.max(bounds.total_low)))
        self.bounds = dataclasses.replace(bounds, total_high=np.minimum(bounds.total_high, most))
        self.sync_schedule.limit_to(samples)

    def facts(self, closing: ClosedWindow) -> dict[str, float]:
        """The fields of a `Window` that describe the job itself."""
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

        Raises `ConfigError` if a fixed one is out of bounds.
        """
        self.bounds, self.base_batch, self.shares = self.bounds_from(base_batch), base_batch, shares
        self.closing, self.parting = self._none_closed(step, samples), self.parting.begun_anew()
        self.at_once = self.sync_schedule.at_once(base_batch, self.bounds.low.size)
        self.sync_schedule.begin_anew()

    def bounds_from(self, base_batch: int) -> Bounds:
        """`bounds` of a job that began with `base_batch`. Raises `ConfigError` if a fixed one is out of bounds."""
        return fixed_at(self.bounds, base_batch) if self.fixed and base_batch != self.base_batch else self.bounds

    def in_pieces(self) -> Bounds:
        """`bounds` of a piece: samples of a worker per micro-batch. Their totals are the round's."""
        pieces, bounds = self.accumulate, self.bounds
        low, high = bounds.low // pieces, bounds.high // pieces
        return dataclasses.replace(bounds, low=low, high=high, quantum=bounds.quantum // pieces)
