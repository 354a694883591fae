"""The owner of a sampler or stream: what a source asks of its job, and a default for sources without a job."""

import math
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dynamix.errors import DynamixError


class Meeting(Protocol):
    """How ranks synchronise after a round whose ledger entry has `piece`: see `Allocations`."""

    def local(self, piece: int) -> tuple[bool, int]:
        """Whether ranks take local steps in the round, and samples of such a step; 0: a rank's share, or no step."""

    def most(self, piece: int, limit: int) -> int | None:
        """Most samples of a rank's pieces if it can hold `limit`; None: its share is one piece."""


class SourceOwner(Protocol):
    """The job's interface for a source while it issues batches. The source calls it, and it never calls back.

    A round begins under the `lock`, and only below the `horizon`. So the holder of the lock knows which rounds have
    begun, and a decision on them can change only later rounds.
    """

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    @property
    def meeting(self) -> Meeting: ...

    @property
    def horizon(self) -> float:
        """The first round that a pending decision may still change; infinite if none is pending."""

    def settle(self) -> None:
        """Wait for the pending decision and apply it. The horizon then moves on."""

    def iteration_begins(self) -> None:
        """Called before every iteration and `set_epoch`, while batches that the loop has not consumed still exist."""

    def resumed(self) -> None:
        """Called once, at the first batch asked for after a load, when the loader's iterator exists."""

    def fail(self, error: DynamixError) -> DynamixError:
        """Called with every error of an iteration before it is raised; returns the error to raise."""


class EveryStep:
    """Gradients are averaged after every round."""

    def local(self, piece: int) -> tuple[bool, int]:
        return False, 0

    def most(self, piece: int, limit: int) -> int | None:
        return limit


class Nobody:
    """The owner of a source without a controller: it decides nothing and ignores every call."""

    def __init__(self) -> None:
        self.lock, self.horizon, self.meeting = threading.Lock(), math.inf, EveryStep()

    def settle(self) -> None: ...

    def iteration_begins(self) -> None: ...

    def resumed(self) -> None: ...

    def fail(self, error: DynamixError) -> DynamixError:
        return error
