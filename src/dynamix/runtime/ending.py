"""How an error of one rank ends the job on all of them: it is left in the job's store, and waiting ranks look there.

Nothing is asked of the store while ranks do not wait for each other. Where they do, they wait here and not inside a
collective, look into the store now and then, and raise what they find.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from dynamix import errors
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.control import ControlGroup

LOOK_EVERY_S = 0.25
LINGER_S = 3.0  # how long a rank that ends the job stays for the others to read why: it may hold the store
BESIDE_S = 5.0  # in one wait, while another rank waits for an agreement that this one does not know of: a deadlock
_opened: Counter[str] = Counter()


class Ending:
    """One rank's part. `store` is the job's, `prefix` the same on all ranks of this controller and on no others."""

    def __init__(self, store: Any, prefix: str, *, rank: int, workers: int) -> None:
        self._prefix, self.rank, self.workers = prefix, rank, workers
        self._store = store
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            self._store = store.clone()  # a connection that others do not wait behind
        self.ended: DynamixError | None = None
        self.agreements = 0
        self._beside: float | None = None

    @classmethod
    def of(cls, group: ControlGroup) -> "Ending":
        """For the ranks of a controller's own `group`."""
        from torch.distributed import distributed_c10d

        _opened[name := group.name] += 1  # torch uses names again
        store, prefix = distributed_c10d._get_default_store(), f"dynamix/ended/{name}/{_opened[name]}"
        return cls(store, prefix, rank=group.rank, workers=group.workers)

    def report(self, error: DynamixError) -> DynamixError:
        """Tell the other ranks of `error`, stay until they know or `LINGER_S` are over, and return it, to be raised."""
        if self.ended is None:
            self.ended = error
            with contextlib.suppress(Exception):  # without a store the error must still be raised
                told = {"rank": self.rank, "kind": type(error).__name__, "message": str(error)}
                self._store.compare_set(self._prefix, "", json.dumps(told))
                self._store.add(f"{self._prefix}/know", 1)
                deadline = time.monotonic() + LINGER_S
                while self._store.add(f"{self._prefix}/know", 0) < self.workers and time.monotonic() < deadline:
                    time.sleep(0.05)
        return error

    def told(self) -> DynamixError | None:
        """What another rank has ended the job with; None while none did, or where the store does not answer."""
        if self.ended is None:
            with contextlib.suppress(Exception):
                if self._store.check([self._prefix]):
                    told = json.loads(bytes(self._store.get(self._prefix)))
                    self._store.add(f"{self._prefix}/know", 1)
                    kind = getattr(errors, str(told["kind"]), UsageError)
                    kind = kind if issubclass(kind, UsageError | errors.StateError) else UsageError
                    self.ended = kind(f"rank {told['rank']} ended the job: {told['message']}")
        return self.ended

    def look(self) -> None:
        """Raise what another rank has ended the job with, if one did. To be called now and then while waiting."""
        if (error := self.told()) is not None:
            raise error
        if self._beside is not None and time.monotonic() - self._beside > BESIDE_S:
            why = "a rank loaded a state, or made a first forward pass, that this rank did not"
            raise self.report(UsageError(f"{why}: call controller.load_state_dict(state) on every rank or on none"))
        with contextlib.suppress(Exception):
            if self._beside is None and self._store.check([self._agreement(self.agreements)]):
                self._beside = time.monotonic()

    def wait(self, done: Callable[[], bool]) -> None:
        """Until `done()`. Raises what another rank ends the job with meanwhile."""
        pause_s, since = 1e-4, time.monotonic()
        while not done():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)
            if time.monotonic() - since > LOOK_EVERY_S:
                since = time.monotonic()
                self.look()
        self._beside = None

    def agreeing(self) -> None:
        """All ranks are about to compare what they hold: say so, for those that never come."""
        with contextlib.suppress(Exception):
            self._store.set(self._agreement(self.agreements), "")
        self.agreements += 1

    def close(self) -> None:
        """Let go of the store."""
        self._store = None

    def _agreement(self, number: int) -> str:
        return f"{self._prefix}/agree/{number}"


def wait_for(work: Any, ending: Ending | None) -> None:
    """`work.wait()` of a collective, given up where another rank ends the job."""
    if ending is not None:
        ending.wait(work.is_completed)
    work.wait()


class Arrivals:
    """The reductions of one backward pass, and the wait for them at its end: in Python, where it can be given up."""

    def __init__(self, ending: Ending | None) -> None:
        self.ending = ending
        self._changed = threading.Condition()
        self._outstanding, self._failed = 0, False

    def expect(self) -> None:
        """A reduction was begun."""
        with self._changed:
            self._outstanding += 1

    def arrived(self, *, failed: bool = False) -> None:
        """A reduction has ended, on whichever thread."""
        with self._changed:
            self._outstanding -= 1
            self._failed = self._failed or failed
            if self._outstanding <= 0:
                self._changed.notify_all()

    def wait(self) -> None:
        """Until all have ended. Raises what another rank ends the job with meanwhile."""
        ending = self.ending
        with self._changed:
            while self._outstanding > 0:
                if not self._changed.wait(LOOK_EVERY_S) and ending is not None:
                    ending.look()
        if ending is not None:
            ending._beside = None
            if self._failed and (error := ending.told()) is not None:
                raise error
