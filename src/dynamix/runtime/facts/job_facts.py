"""State of a job that is equal on all ranks: the terms of its windows, and the bounds of its allocations.

Also what ranks exchange about it: the window that closed, and the message that answers it.
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
    """The single message about a window, the same on every rank."""

    kind: Kind
    from_step: int  # round from which `sizes` apply (NEW)
    noise: float
    signal: float
    sizes: Ints  # samples per round
    interval: int = 0  # steps of the next window; 0: as in this one
    piece: int = 0  # samples of a local step, if workers take local steps in rounds of `sizes`
    differ: bool = False  # digests of shared state differed: all ranks compare that state

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
    """The closed window that waits for its decision."""

    window_index: int
    sizes: Ints  # the allocation while it was open, samples per round
    consumed: int  # rounds done when it closed
    issued: int  # rounds that this rank's sampler had begun by then
    age: float  # rounds since `sizes` took effect
    step: int  # optimizer steps done
    samples: int
    payload: float = 1.0  # bytes sent to average parameters, relative to a gradient's
    piece: int = 0  # samples of a local step, if the allocation used local steps
    comparable: bool = False  # all workers' batches are drawn alike, so their losses can be compared


class JobFacts:
    """State of the job of `config` that is equal on all ranks. It changes only when the ranks agree on it.

    bounds       bounds of batch sizes, samples per round, on a grid that pieces divide
    base_batch   samples per round of all workers at the start (B0)
    accumulate   micro-batches per optimizer step
    slack        rounds that may still be issued under the old allocation after a window closed; None: a live job's
    ahead        rounds that a simulated loader has issued in addition to its sampler's
    fixed        the global batch stays at `base_batch`
    may_fall     the global batch may become smaller than at the start if memory requires it, as the user set no minimum
    sync_schedule   chooses how workers synchronise
    piece        most samples of a piece, as the user said; a rank's memory may allow fewer
    per_epoch    a window is an epoch
    hosts        of every rank; empty if they are unknown
    shares       relative shares of workers that were here, by worker (`hosts.remembered`)
    noise_scale  smoothed over windows; updated on the rank that decides, or on all if each decides
    weight_test  None: losses are not compared with shares
    unlike       what some ranks did and others did not; set on the ranks that update `noise_scale`
    closing      the window that closed last
    at_once      samples of the steps that all workers took simultaneously at the start
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
        """Store the window that has just closed."""
        self.closing = closing

    def test_weights(self, test: WeightTest) -> None:
        """Compare losses with shares, by `test`."""
        self.weight_test = test

    def tell_beside(self, told: Told) -> None:
        """Report that the loop has trained samples that it was not dealt."""
        self.parting.tell_beside(told)

    def narrow(self, bounds: Bounds) -> None:
        """Use `bounds` from now on."""
        self.bounds = bounds

    def decide_per_epoch(self) -> None:
        """From now on a window is an epoch, and after its end no round is issued under the old allocation."""
        self.per_epoch, self.slack = True, 0

    def require_right(self) -> None:
        """Raise `UsageError` if some ranks acted unlike the others, or if losses carry other weights than stated."""
        of_weights = None if self.weight_test is None else self.weight_test.wrong
        if wrong := of_weights or self.unlike:
            raise UsageError(wrong)

    def facts_alike(self) -> dict[str, Any]:
        """State that must be equal on all ranks, by name."""
        bounds = self.bounds
        known: dict[str, Any] = {"min_batch_size": bounds.low, "max_batch_size": bounds.high, "quantum": bounds.quantum}
        known |= {"min_global_batch": bounds.total_low, "max_global_batch": bounds.total_high}
        return known | {"base batch": self.base_batch, "decides once per epoch": self.per_epoch, "slack": self.slack}

    def look(self, held: Floats, unlike: str | None = None) -> None:
        """Process all ranks' figures of shared state, (W, n), and `unlike`, what only some ranks did."""
        self.parting.look(held)
        self.unlike = self.unlike or unlike or self.parting.wrong

    def limit_to(self, samples: int) -> None:
        """Limit rounds to a data set's size: larger rounds would all be tails, so no window would ever close."""
        bounds = self.bounds
        most = max(samples // bounds.quantum * bounds.quantum, int(np.max(bounds.total_low)))
        self.bounds = dataclasses.replace(bounds, total_high=np.minimum(bounds.total_high, most))
        self.sync_schedule.limit_to(samples)

    def facts(self, closing: ClosedWindow) -> dict[str, float]:
        """The fields of a `Window` that describe the job."""
        own = {"micro_batches": self.accumulate, "base_batch": self.base_batch}
        return own | {"age": closing.age, "step": closing.step}

    def keep(self, kind: Kind) -> Message:
        """A message that changes nothing."""
        return self.message(kind, self.closing.consumed, self.closing.sizes, self.closing.piece)

    def change(self, sizes: Ints, issued: int, piece: int = 0) -> Message:
        """A message that applies `sizes` (W,), after the `issued` rounds, the most that any rank had begun."""
        return self.message(Kind.NEW, issued + self.slack, sizes, piece)

    def message(self, kind: Kind, from_step: int, sizes: Ints, piece: int = 0) -> Message:
        """A message that carries this rank's noise scale."""
        return Message(kind, from_step, self.noise_scale.noise, self.noise_scale.signal, sizes, piece=piece)

    def resume(self, base_batch: int, step: int, samples: int, shares: dict[str, float]) -> None:
        """Resume at `step` and `samples`, as a job that started with `base_batch`.

        Raises `ConfigError` if the global batch is fixed and `base_batch` is out of bounds.
        """
        self.bounds, self.base_batch, self.shares = self.bounds_from(base_batch), base_batch, shares
        self.closing, self.parting = self._none_closed(step, samples), self.parting.begun_anew()
        self.at_once = self.sync_schedule.at_once(base_batch, self.bounds.low.size)
        self.sync_schedule.begin_anew()

    def bounds_from(self, base_batch: int) -> Bounds:
        """`bounds` for a start with `base_batch`. Raises `ConfigError` if it is fixed and out of bounds."""
        return fixed_at(self.bounds, base_batch) if self.fixed and base_batch != self.base_batch else self.bounds

    def in_pieces(self) -> Bounds:
        """`bounds` per micro-batch: samples of a worker. Totals stay per round."""
        pieces, bounds = self.accumulate, self.bounds
        low, high = bounds.low // pieces, bounds.high // pieces
        return dataclasses.replace(bounds, low=low, high=high, quantum=bounds.quantum // pieces)
