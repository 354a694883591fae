"""When workers meet, and over what: over gradients after every step, or over parameters after steps of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from dynamix.window import Bounds, Ints, Window

Ask = Callable[[Window, Bounds], Ints]  # a policy: sizes (W,) within bounds, after a window


class Conditions(NamedTuple):
    """The conditions of a round that no window holds.

    piece     of its rounds
    payload   bytes that a meeting over parameters moves, over those of a gradient
    samples   trained by then
    """

    piece: int = 0
    payload: float = 1.0
    samples: float = 0.0


class SyncSchedule:
    """Chooses how workers meet, window by window; a job has one. This one lets gradients meet after every step.

    A round has a `piece`, which its allocation says: samples of a worker's own step; 0 where none is said.

    steps_apart   in some rounds every piece is an optimizer step of its worker's own, and workers meet over parameters
    mixed         in others gradients meet: workers step apart in a round that has a `piece`
    """

    steps_apart: ClassVar[bool] = False
    mixed: ClassVar[bool] = False

    def decide(self, ask: Ask, window: Window, bounds: Bounds, now: Conditions) -> tuple[Ints, int]:
        """After `window`, of one job, shape (W,), as it was measured: the sizes (W,) of a round, and its `piece`.

        ask      gives the policy's sizes
        bounds   of the job
        """
        return ask(window, bounds), 0

    def bounds_of(self, piece: int, bounds: Bounds) -> Bounds:
        """The bounds of rounds of such a `piece`, in a job of `bounds`."""
        return bounds

    def local(self, piece: int) -> tuple[bool, int]:
        """Whether workers step apart in a round, and samples of such a step; 0: it is a worker's share, or none."""
        return False, 0

    def most(self, piece: int, limit: int) -> int | None:
        """Most samples of a worker's batch, of `limit` at most; None: a share is one batch."""
        return limit

    def at_once(self, samples: int, workers: int) -> int:
        """Samples of the steps that all workers take at the same time, in a job whose rounds begin with `samples`."""
        return samples

    def limit_to(self, samples: int) -> None:
        """An epoch has so many samples."""

    def begin_anew(self) -> None:
        """The job goes on from a state: what was measured is forgotten."""

    @property
    def report(self) -> dict[str, Any]:
        """For the events: why rounds are as they are; empty where nothing was to be chosen."""
        return {}
