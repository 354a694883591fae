"""Waits for other ranks, in Python: each is given up where another rank ends the job."""

from __future__ import annotations

import datetime

from dynamix.errors import UsageError
from dynamix.runtime.ranks.watch import RankWatch

LOOK_EVERY_S = 0.25
LOOK_EVERY = datetime.timedelta(seconds=LOOK_EVERY_S)
BESIDE_S = 5.0  # in one wait, while another rank waits for an agreement that this one does not know of: a deadlock
SETUP_ERROR_S = 8.0  # in one wait, while another rank has raised an error before training and not gone on


class AbortableWait:
    """One wait of this rank for others, and what it hears meanwhile."""

    def __init__(self, watch: RankWatch) -> None:
        self.watch = watch
        self._looked = watch.clock()
        # Seconds of this wait, as far as this rank was awake: that another one waits for an agreement, or is in an
        # error that it raised before training.
        self._beside_s = self._error_s = 0.0

    def look(self) -> None:
        """Raise what another rank has ended the job with, if one did. To be called now and then while waiting."""
        watch, errors = self.watch, self.watch.errors
        watch.hurry()
        beside, error, now = errors.beside, errors.setup_error, watch.clock()
        awake_s, self._looked = min(now - self._looked, 2 * LOOK_EVERY_S), now
        self._beside_s += awake_s * (beside is not None)
        self._error_s = 0.0 if error is None else self._error_s + awake_s
        if errors.ended is not None:
            raise errors.ended
        if (unlike := errors.unlike) is not None:
            raise watch.end(UsageError(unlike))
        if beside is not None and self._beside_s > BESIDE_S:
            raise watch.end(UsageError(beside))
        if error is not None and self._error_s > SETUP_ERROR_S:
            raise watch.end(error)
        watch.require_all_come()
