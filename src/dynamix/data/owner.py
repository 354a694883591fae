"""Whom a sampler or stream belongs to: what it asks of a job, and of nobody where it is made without one."""

import math
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dynamix.errors import DynamixError


class Meeting(Protocol):
    """How ranks meet after a round, of which the ledger says the `piece`: see `Allocations`."""

    def local(self, piece: int) -> tuple[bool, int]:
        """Whether ranks step apart in the round, and samples of such a step; 0: it is a rank's share, or none."""

    def most(self, piece: int, limit: int) -> int | None:
        """Most samples of a rank's pieces, if it holds `limit`; None: its share is one."""


class SourceOwner(Protocol):
    """The owner that a source tells, and asks, while it issues batches. It is called by the source only, never calls
    back.

    A round is begun under the `lock`, and only below the `horizon`: so whoever holds the lock knows which rounds were
    begun, and no other may be changed by what is decided on them.
    """

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    @property
    def meeting(self) -> Meeting: ...

    @property
    def horizon(self) -> float:
        """The first round that a decision under way may still change; infinite if none is under way."""

    def settle(self) -> None:
        """Take the decision under way, waiting for it. The horizon is then beyond what it was."""

    def iteration_begins(self) -> None:
        """Before every iteration and every `set_epoch`, while what the loop left unconsumed is still there."""

    def resumed(self) -> None:
        """Once, at the first batch asked for after a load: the loader's iterator exists by then."""

    def fail(self, error: DynamixError) -> DynamixError:
        """Gets every error of an iteration before it is raised, and says what to raise."""


class EveryStep:
    """Gradients meet after every round."""

    def local(self, piece: int) -> tuple[bool, int]:
        return False, 0

    def most(self, piece: int, limit: int) -> int | None:
        return limit


class Nobody:
    """The owner of a source that is made without a controller: nothing is decided, and nobody is told."""

    def __init__(self) -> None:
        self.lock, self.horizon, self.meeting = threading.Lock(), math.inf, EveryStep()

    def settle(self) -> None: ...

    def iteration_begins(self) -> None: ...

    def resumed(self) -> None: ...

    def fail(self, error: DynamixError) -> DynamixError:
        return error
