"""When workers synchronise, and how: averaging gradients after every step, or parameters after local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from dynamix.window import Bounds, Ints, Window

Ask = Callable[[Window, Bounds], Ints]  # a policy: sizes (W,) within bounds, after a window


class Conditions(NamedTuple):
    """Conditions of a round that are not in its window.

    piece     samples of a worker's local step
    payload   bytes of averaging parameters over those of a gradient
    samples   trained so far
    """

    piece: int = 0
    payload: float = 1.0
    samples: float = 0.0


class SyncSchedule:
    """Chooses how workers synchronise, window by window; a job has one. This one averages gradients after every step.

    A round has a `piece`, given by its allocation: the samples of a worker's local step; 0 if none is given.

    steps_apart   in some rounds every piece is a local step of its worker, and workers average parameters
    mixed         in other rounds workers average gradients; they take local steps in a round that has a `piece`
    """

    steps_apart: ClassVar[bool] = False
    mixed: ClassVar[bool] = False

    def decide(self, ask: Ask, window: Window, bounds: Bounds, now: Conditions) -> tuple[Ints, int]:
        """The sizes (W,) of a round, and its `piece`, after the measured `window` of one job, shape (W,).

        ask      gives the policy's sizes
        bounds   of the job
        """
        return ask(window, bounds), 0

    def bounds_of(self, piece: int, bounds: Bounds) -> Bounds:
        """The bounds of rounds with this `piece`, in a job of `bounds`."""
        return bounds

    def local(self, piece: int) -> tuple[bool, int]:
        """Whether workers take local steps in a round, and samples of a step; 0: the worker's share, or no step."""
        return False, 0

    def most(self, piece: int, limit: int) -> int | None:
        """Most samples of a worker's batch, at most `limit`; None: a share is one batch."""
        return limit

    def at_once(self, samples: int, workers: int) -> int:
        """Samples of one step of all workers together, in a job whose rounds begin with `samples`."""
        return samples

    def limit_to(self, samples: int) -> None:
        """Tell the schedule the samples of an epoch."""

    def begin_anew(self) -> None:
        """Forget what was measured, because the job resumes from a state."""

    @property
    def report(self) -> dict[str, Any]:
        """For the events: the reason for the rounds as they are; empty if there was no choice."""
        return {}
