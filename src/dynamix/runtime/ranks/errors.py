"""How an error of one rank ends the job on all of them: it is left in the job's store, and waiting ranks look there.

Nothing is asked of the store while ranks do not wait for each other. Where they do, they wait here and not inside a
collective, look into the store now and then, and raise what they find. The store is talked to in a thread of its own:
one on a host that hangs never answers, and its clients have no timeout.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dynamix.errors import DynamixError, MemoryLimitError, StateError, UsageError, WorkerLostError
from dynamix.runtime.ranks.store import job_store, own_connection

LOOK_EVERY_S = 0.25
_LOOK_EVERY = datetime.timedelta(seconds=LOOK_EVERY_S)
LINGER_S = 3.0  # how long a rank that ends the job stays for the others to read why: it may hold the store
BESIDE_S = 5.0  # in one wait, while another rank waits for an agreement that this one does not know of: a deadlock
SETUP_ERROR_S = 8.0  # in one wait, while another rank has raised an error before training and not gone on
FIRST_PASS = "a comparison before the first forward pass"  # since the start, a load, or a loop that was left early
ALIKE = "call what waits for all ranks on every rank, after the same optimizer step"
ANSWER_S = 1.0  # longest wait for the store's word on why a collective has failed
_opened: Counter[str] = Counter()
_log = logging.getLogger("dynamix")


def unnamed(error: BaseException, what: str) -> WorkerLostError:
    """What to raise where a collective, which was for `what`, has failed, and nobody knows which rank it was."""
    return WorkerLostError(f"{what}: a rank died or did not answer within the process group's timeout ({error})")


class StoreThread:
    """What is asked of a store, one after the other, in a thread that begins with the first question."""

    def __init__(self, store: Any) -> None:
        self._store = store
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            self._store = own_connection(store)
        self._questions: queue.SimpleQueue[tuple[Callable[[Any], object], threading.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, question: Callable[[Any], object]) -> threading.Event:
        """Let `question(store)` run soon. The event is set once it has, or has failed."""
        answered = threading.Event()
        if self._closed:
            answered.set()
            return answered
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dynamix-ending", daemon=True)
            self._thread.start()
        self._questions.put((question, answered))
        return answered

    def close(self) -> None:
        """End the thread, if the store answers soon, and let go of the store."""
        self._closed = True
        if self._thread is not None:
            self._questions.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(2.0)
        self._thread = self._store = None

    def _serve(self) -> None:
        store = self._store
        while (asked := self._questions.get()) is not None:
            question, answered = asked
            try:
                question(store)
            except Exception as error:  # without a store each rank still has its own error to raise
                _log.debug("the job's store does not answer: %s", error)
            answered.set()
            del asked, question  # or an idle thread would hold what was asked for


class JobErrors:
    """One rank's part. `store` is the job's, `prefix` the same on all ranks of this controller and on no others."""

    def __init__(self, store: Any, prefix: str, *, rank: int, workers: int) -> None:
        self.prefix, self.rank, self.workers = prefix, rank, workers
        self.store = StoreThread(store)
        weakref.finalize(self, self.store.close)
        self.ended: DynamixError | None = None
        self.agreements = self.setup_errors = 0
        self.unlike: str | None = None  # what this rank waits for is not what others wait for
        self._went_on = True  # since the last error before training, if there was one

    @classmethod
    def open(cls, name: str, ranks: list[int]) -> JobErrors:
        """For a controller over `ranks` (numbers in the job), whose group has this `name`. Each of them calls this."""
        _opened[name] += 1  # one group may have several controllers
        store, prefix = job_store(), f"dynamix/ended/{name}/{_opened[name]}"
        return cls(store, prefix, rank=ranks.index(dist.get_rank()), workers=len(ranks))

    def settle(self, work: Any) -> None:
        """`work.wait()` of a collective, given up where another rank ends the job."""
        wait_for(work, self)

    def report(self, error: DynamixError) -> DynamixError:
        """Tell the other ranks of `error`, stay until they know or `LINGER_S` are over, and return it, to be raised."""
        if self.ended is None:
            self.ended = error
            told, deadline = self._words(error), time.monotonic() + LINGER_S

            def tell(store: Any) -> None:
                store.compare_set(self.prefix, "", told)
                store.add(f"{self.prefix}/know", 1)
                while store.add(f"{self.prefix}/know", 0) < self.workers and time.monotonic() < deadline:
                    time.sleep(0.05)

            self.store.ask(tell).wait(LINGER_S)
        return error

    def told(self) -> DynamixError | None:
        """Where a collective has failed: what another rank has ended the job with, or raised before training.

        None where none did, or where the store does not answer soon.
        """
        found: list[DynamixError | None] = []
        if self.ended is None:
            self.store.ask(lambda store: found.append(self.find(store) or self.find_setup_error(store))).wait(ANSWER_S)
        return self.ended or next(iter(found), None)

    def wait(self, arrived: threading.Event) -> None:
        """Until `arrived` is set. Raises what another rank ends the job with meanwhile."""
        watch = None
        while not arrived.wait(LOOK_EVERY_S):
            watch = watch or AbortableWait(self)
            watch.look()

    def agreeing(self, what: str) -> None:
        """All ranks are about to wait for each other in `what`: say so, for those that never come."""
        key, over = self.agreement(), self.agreement(-2)  # all ranks have left that one
        removes = self.rank == 0 and self.agreements >= 2
        self.agreements += 1

        def tell(store: Any) -> None:
            theirs = bytes(store.compare_set(key, "", what)).decode()
            if theirs != what:
                self.unlike = f"this rank waits in {what}, another one in {theirs}: {ALIKE}"
            if removes:
                store.delete_key(over)

        self.store.ask(tell)

    def setup_failed(self, error: Exception) -> None:
        """This rank raises `error` before training. Those who wait for it meanwhile end, unless it goes on."""
        self.setup_errors, self._went_on = self.setup_errors + 1, False
        keys, told = self._setup_keys(), self._words(error)

        def tell(store: Any) -> None:
            for key in keys:
                store.set(key, told)
                store.add(f"{key}/unsettled", 1)

        self.store.ask(tell).wait(ANSWER_S)  # this process may be about to end

    def setup_goes_on(self) -> None:
        """The caller has dealt with the error that it was given, if there was one."""
        if not self._went_on:
            self._went_on, keys = True, self._setup_keys()
            self.store.ask(lambda store: [store.add(f"{key}/unsettled", -1) for key in keys])

    def close(self) -> None:
        """Let go of the store, and end the thread that talks to it."""
        self.store.close()

    # ------------------------------------------------------------ in the store

    def find(self, store: Any) -> DynamixError | None:
        """Ask `store` whether the job has ended, and with what."""
        if self.ended is None and store.check([self.prefix]):
            self.ended = ended_by(json.loads(bytes(store.get(self.prefix))))
            store.add(f"{self.prefix}/know", 1)
        return self.ended

    def find_setup_error(self, store: Any) -> DynamixError | None:
        """Ask `store` for an error before training of a rank that has not gone on, and had more of them than this."""
        key = self.setup_key(self.setup_errors)
        if not (store.check([key]) and store.add(f"{key}/unsettled", 0) > 0):
            return None
        return ended_by(json.loads(bytes(store.get(key))))

    def agreement(self, after: int = 0) -> str:
        """The key under which a rank says that it has come to the next agreement, or the one so many `after` it."""
        return f"{self.prefix}/agree/{self.agreements + after}"

    def setup_key(self, number: int) -> str:
        """The key of an error before training, of a rank that had `number` before. Who had as many looks further."""
        return f"{self.prefix}/setup/{number}"

    def _setup_keys(self) -> list[str]:
        return [self.setup_key(number) for number in range(self.setup_errors)]

    def _words(self, error: Exception) -> str:
        return json.dumps({"rank": self.rank, "kind": type(error).__name__, "message": str(error)})


class AbortableWait:
    """One wait of this rank for others, and what it finds in the store meanwhile."""

    def __init__(self, ending: JobErrors) -> None:
        self.ending = ending
        self._asked: threading.Event | None = None
        self._looked: float | None = None
        # Seconds of this wait, as far as this rank was awake: that another one waits for an agreement, or is in an
        # error that it raised before training.
        self._beside_s = self._error_s = 0.0
        self._beside: str | None = None
        self._error: DynamixError | None = None

    def look(self) -> None:
        """Raise what another rank has ended the job with, if one did. To be called now and then while waiting."""
        ending, now = self.ending, time.monotonic()
        awake_s = min(now - (self._looked or now), 2 * LOOK_EVERY_S)
        self._looked, error = now, self._error
        self._beside_s += awake_s * (self._beside is not None)
        self._error_s = 0.0 if error is None else self._error_s + awake_s
        if ending.ended is not None:
            raise ending.ended
        if ending.unlike is not None:
            raise ending.report(UsageError(ending.unlike))
        if self._beside_s > BESIDE_S:
            raise ending.report(UsageError(_beside(self._beside)))
        if error is not None and self._error_s > SETUP_ERROR_S:
            raise ending.report(error)
        if self._asked is None or self._asked.is_set():
            self._asked = ending.store.ask(self._ask)

    def _ask(self, store: Any) -> None:
        ending = self.ending
        ending.find(store)
        key = ending.agreement()
        self._beside = bytes(store.get(key)).decode() if store.check([key]) else None
        self._error = ending.find_setup_error(store)


def _beside(what: str | None) -> str:
    if what != FIRST_PASS:
        return f"another rank waits in {what}, which this rank did not call: {ALIKE}"
    why = "a rank loaded a state, left an epoch early, or made a first forward pass, that this rank did not"
    do = "call controller.load_state_dict(state) on every rank or on none"
    return f"{why}: {do}; leave a loop early only after the same optimizer step on all ranks"


def ended_by(told: dict[str, Any]) -> DynamixError:
    """The error that a rank raises for one of another."""
    known: dict[str, type[DynamixError]] = {"UsageError": UsageError, "StateError": StateError}
    known["MemoryLimitError"] = MemoryLimitError
    return known.get(told["kind"], UsageError)(f"rank {told['rank']} ended the job: {told['message']}")


def wait_for(work: Any, ending: JobErrors) -> None:
    """`work.wait()` of a collective, given up where another rank ends the job."""
    if not work.is_completed():
        arrived = threading.Event()
        # On CUDA it is there at once, as for `work.wait()`: neither waits for the device.
        work.get_future().add_done_callback(lambda _: arrived.set())
        ending.wait(arrived)
    _result_of(work, ending)


def wait_here(work: Any, ending: JobErrors) -> None:
    """`wait_for` of a collective on CPUs: no other thread of this process needs Python's lock meanwhile."""
    watch = None
    while True:
        try:
            work.wait(_LOOK_EVERY)
            return
        except RuntimeError:
            if work.is_completed():
                break  # meanwhile, or with an error of its own
        watch = watch or AbortableWait(ending)
        watch.look()
    _result_of(work, ending)


def _result_of(work: Any, ending: JobErrors) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        if (told := ending.told()) is not None:
            raise told from error
        raise


class Arrivals:
    """The reductions of one backward pass, and the wait for them at its end: in Python, where it can be given up."""

    def __init__(self, ending: JobErrors | None) -> None:
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
        ending, watch = self.ending, None
        with self._changed:
            while self._outstanding > 0:
                if not self._changed.wait(LOOK_EVERY_S) and ending is not None:
                    watch = watch or AbortableWait(ending)
                    watch.look()
        if ending is not None and self._failed and (error := ending.told()) is not None:
            raise error
