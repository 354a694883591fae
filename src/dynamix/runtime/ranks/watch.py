"""Watches a job's ranks: one beat a second through the job's store, outside the training step.

Every rank writes one key: that it lives, whether it ends the job and why, what it waits for, whether it requests to
stop, its last message. The first rank reads all keys and writes one view, which the others read: three requests a
second and rank for any number of ranks. A rank that waits for others looks at what was read, never at the store.

One thread talks to the store. Another measures the silence, because a store on a host that hangs never answers, and its
clients have no timeout.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from dynamix.errors import DynamixError, UsageError, WorkerLostError
from dynamix.runtime.ranks.errors import JobErrors
from dynamix.runtime.ranks.liveness import BEAT_S, LATE_S, QUIET_S, Liveness, Silence, failed_collective, first_line
from dynamix.runtime.ranks.stopping import Stopping
from dynamix.runtime.ranks.store import LINGER_S, own_connection
from dynamix.runtime.ranks.uncaught import tell_of_uncaught

HASTE_S = 0.2  # between beats while ranks wait for a message
GONE_S = 15.0  # of silence, or since it left: no rank waits any longer for this one
VERDICT_S = 7.0  # longest that a failed collective waits to find out which rank failed
NAMED_S = 1.2  # rank 0, which hears from all, stays so long that others can read which rank was lost
KNOWN_S = 3.0  # a rank that ends the job stays so long for others to read why: it may hold the store
ANSWER_S = 1.0  # longest wait for others' message on why a collective failed, and for this rank's to be written
LEAVE_S = 2.0  # for the last message
CONNECT_S = 1.0  # for a new connection to a store that did not answer
GIVE_UP_S = 60.0  # without an answer: the store is gone
LOOK_EVERY_S = 0.25
LOOK_EVERY = timedelta(seconds=LOOK_EVERY_S)
BESIDE_S = 5.0  # of one wait, while another rank waits in an agreement that this one has not entered: a deadlock
SETUP_ERROR_S = 8.0  # of one wait, while another rank has raised an error before training and not continued
CLOSED = "its controller was closed"
# The state of a rank: it waits for no other; it waits, and others' errors reach it; it is in a collective of its loop.
RUNS, WAITS, INSIDE = "012"
Look = Callable[[str], tuple[bool, DynamixError | None]]
"""Gets every rank's state, one character each. Returns whether this rank is INSIDE, and an error that ends the job."""
_log = logging.getLogger("dynamix")


class RankWatch:
    """One rank's watch, of `workers` ranks that use keys under `prefix` in `store`. It starts at once; `leave` ends it.

    clock     seconds, like `time.monotonic`
    threads   False: the caller runs `beat` and `listen` now and then
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        workers: int,
        *,
        prefix: str = "dynamix/watch",
        clock: Callable[[], float] = time.monotonic,
        threads: bool = True,
    ) -> None:
        self.rank, self.workers, self._prefix, self.clock = rank, workers, prefix, clock
        self.errors, self.alive, self.stopping = JobErrors(rank), Liveness(rank, workers), Stopping(alone=workers == 1)
        self.lost: WorkerLostError | None = None
        self._looks, self._places = list[Look](), ""
        self._viewed = Silence()
        self._setting_up = True
        self._source: Any = store
        self._store: Any = None  # a connection that only the thread uses
        self._begun = {rank}
        self._haste_until = -math.inf
        self._wake, self._end = threading.Event(), threading.Event()
        self._threads = list[threading.Thread]()
        if threads and workers > 1:
            tell_of_uncaught(self.uncaught)
            for work, name in ((self._talk, "dynamix-beat"), (self._listen, "dynamix-listen")):
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()

    # ------------------------------------------------------------ in the loop

    def require_alive(self) -> None:
        """Raise `WorkerLostError` if a rank whose answer on when to stop is needed has ended, or is silent."""
        if self.alive.left or self._silent_s() > GONE_S:
            raise self.explain(RuntimeError("no answer"), "the ranks could not agree on the step to stop after")

    def _silent_s(self) -> float:
        return max(self.alive.silent.values(), default=0.0)

    def request_stop(self) -> None:
        """Ask all ranks to stop soon, after the same step. A signal handler may call it: it takes no lock."""
        self.stopping.want()

    # ------------------------------------------------------------ while this rank waits for others

    def hurry(self, seconds: float = 2 * HASTE_S) -> None:
        """Beat more often for `seconds`, because this rank waits for a message."""
        if self.clock() >= self._haste_until:
            self._wake.set()
        self._haste_until = max(self._haste_until, self.clock() + seconds)

    def require_all_come(self) -> None:
        """Raise `WorkerLostError` if a rank, or the store, has long been silent while controllers are made."""
        if self._setting_up and self._silent_s() > LATE_S:
            raise self.explain(RuntimeError("no answer"), "not all ranks have made a Controller")

    def all_have_come(self) -> None:
        """All ranks have made their controllers: from now on a rank may be silent for a while."""
        self._setting_up = False

    def told(self) -> DynamixError | None:
        """The error with which another rank has ended the job, or that it raised before training."""
        seen = self.alive.news
        self._until(lambda: self.errors.ended is not None or self.alive.news > seen + 1, ANSWER_S)
        return self.errors.ended or self.errors.setup_error

    # ------------------------------------------------------------ failures

    def also_look(self, look: Look) -> None:
        """Call `look` at every beat, in the watch's thread."""
        self._looks.append(look)

    def end(self, error: DynamixError) -> DynamixError:
        """Send `error` to the other ranks, wait until they know, at most `KNOWN_S`, and return it to be raised."""
        if self.errors.ended is None:
            self.errors.end(error)
            self._until(lambda: self.errors.all_know, KNOWN_S)
        return error

    def setup_failed(self, error: Exception) -> None:
        """This rank raises `error` before training, and its process may be about to end."""
        self.errors.setup_failed(error)
        said = self.alive.beats
        self._until(lambda: self.alive.beats > said + 1, ANSWER_S)

    def explain(self, error: BaseException, what: str) -> WorkerLostError:
        """The error to raise if a collective has failed with `error`, once it is known which rank failed.

        Waits for that at most `VERDICT_S`; what is still unknown then is left out.
        """
        if self.lost is None:
            alive = self.alive
            self._until(lambda: bool(alive.silent or alive.left), VERDICT_S)
            self.lost = alive.lost(error, what)
            self.hurry(math.inf)
            if self.rank == 0 and self._threads:
                time.sleep(NAMED_S)
        return self.lost

    def uncaught(self, error: BaseException) -> None:
        """This process ends with `error`: note which other rank caused it, if one did, and inform the others."""
        if self.errors.ended is not None and self.errors.ended is not error:
            error.add_note(f"dynamix: {self.errors.ended}")
        elif failed_collective(error):
            error.add_note(f"dynamix: {self.explain(error, 'a collective failed')}")
        self.leave_with(error)

    # ------------------------------------------------------------ the end

    def leave_with(self, error: BaseException) -> None:
        """Send `error`, with which this process is about to end, to the other ranks."""
        self.leave(f"{type(error).__name__}: {first_line(error)}", linger=True)

    def leave(self, word: str = CLOSED, *, linger: bool = False) -> None:
        """Send `word` as the last message, end the threads and release the store; safe to call twice.

        linger   rank 0, whose process may hold the store, stays until the others have read it or are no longer alive
        """
        if self._end.is_set():
            return
        self.alive.leave(word)
        if linger and self.rank == 0:
            self._until(lambda: not self.alive.unaware, LINGER_S)
        self._end.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LEAVE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._store = self._source = None

    def leave_unclosed(self) -> None:
        """The controller was never closed, and is collected or its process ends, possibly with an error."""
        word = "its process ended"
        if self.rank == 0 and threading.main_thread().is_alive():
            # A garbage collection must not wait; a process that ends does wait for this thread.
            threading.Thread(target=self.leave, args=(word,), kwargs={"linger": True}, name="dynamix-leave").start()
        else:
            self.leave(word, linger=True)

    # ------------------------------------------------------------ the two threads

    def beat(self) -> None:
        """Write this rank's state to the store, and read the others'."""
        if self._store is None:
            self._store = own_connection(self._source)
        store, key = self._store, f"{self._prefix}/view"
        place = WAITS if self.clock() < self._haste_until else RUNS
        # A rank that was stopped, even the first, may have an outdated view: others may have continued.
        stale = self._viewed.after(self.clock(), self.alive.news, most=2 * BEAT_S) >= QUIET_S
        for look in self._looks:
            inside, wrong = look(RUNS * len(self._places) if stale else self._places)
            place = INSIDE if inside else place
            if wrong is not None and self.errors.ended is None:
                self.errors.end(wrong)
        said = {"alive": self.alive.beat(), "errors": self.errors.beat(), "stop": self.stopping.beat(), "place": place}
        store.set(f"{self._prefix}/{self.rank}", json.dumps(said))
        if self.rank == 0:
            told = self._view()
            store.set(key, told)
        elif store.check([key]):
            told = bytes(store.get(key)).decode()
        else:
            return
        view = json.loads(told)
        self.alive.follow(view["alive"])
        self.errors.follow(view["errors"])
        self.stopping.follow(view["stop"])
        self._places = view["places"]

    def listen(self) -> None:
        """Count how long the store, or the first rank, has been silent."""
        self.alive.listen(self.clock())

    def _view(self) -> str:
        """The first rank's message to all."""
        store, now = self._store, self.clock()
        keys = {rank: f"{self._prefix}/{rank}" for rank in range(self.workers)}
        if len(self._begun) < self.workers:
            self._begun |= {rank for rank in keys.keys() - self._begun if store.check([keys[rank]])}
        begun = sorted(self._begun)
        many = getattr(store, "has_extended_api", lambda: False)()
        texts = store.multi_get([keys[r] for r in begun]) if many else [store.get(keys[r]) for r in begun]
        beats = {rank: json.loads(bytes(text)) for rank, text in zip(begun, texts, strict=True)}
        alive = self.alive.lead({rank: beat["alive"] for rank, beat in beats.items()}, now)
        errors = self.errors.lead({rank: beat["errors"] for rank, beat in beats.items()}, self.alive.here)
        if len(begun) == self.workers:
            self.stopping.lead([beats[rank]["stop"] for rank in begun], now)
        known = beats.keys() - self.alive.quiet
        places = "".join(beats[rank]["place"] if rank in known else RUNS for rank in range(self.workers))
        return json.dumps({"alive": alive, "errors": errors, "stop": self.stopping.proposal(), "places": places})

    def _talk(self) -> None:
        failed_since: float | None = None
        while True:
            try:
                if failed_since is not None:
                    self._connect_again()
                ends = self._end.is_set()
                self.beat()
                failed_since = None
                if ends:
                    return
            except Exception as error:  # a store's client raises many types; only its silence counts
                _log.debug("the job's store did not answer: %s", error)
                failed_since = failed_since or time.monotonic()
                if self._end.is_set() or time.monotonic() - failed_since > GIVE_UP_S:
                    return
            self._wake.wait(self._pause_s(failed_since))
            self._wake.clear()

    def _pause_s(self, failed_since: float | None) -> float:
        """Seconds until the next beat; after failures the pause doubles each time."""
        if self._end.is_set():
            return 0.0
        if failed_since is not None:
            return max(BEAT_S, time.monotonic() - failed_since)
        hurry = self.clock() < self._haste_until or 0 in self.alive.left or self.errors.ended is not None
        return HASTE_S if hurry or self._setting_up or self.stopping.under_way else BEAT_S

    def _connect_again(self) -> None:
        """After a failed call: a store's client does not repair a broken connection."""
        if self._store is not None and hasattr(self._store, "clone"):
            self._store.set_timeout(timedelta(seconds=CONNECT_S))  # the clone's, too, so that `leave` is not delayed
            self._store = own_connection(self._store, CONNECT_S)

    def _listen(self) -> None:
        while not self._end.wait(BEAT_S / 2):
            self.listen()

    def _until(self, known: Callable[[], bool], most_s: float) -> None:
        """Wait, with frequent beats, until `known()`, at most `most_s`; not after the end."""
        deadline = time.monotonic() + most_s
        self.hurry(most_s)
        self._wake.set()
        talks = self._threads[:1]
        while not (known() or self._end.is_set()) and time.monotonic() < deadline and any(t.is_alive() for t in talks):
            time.sleep(0.02)


class AbortableWait:
    """One wait of this rank for others, in Python. It ends if another rank ends the job; `left`: or has left it."""

    def __init__(self, watch: RankWatch, *, left: bool = True) -> None:
        self.watch, self._ends = watch, left
        self._looked = watch.clock()
        # Seconds of this wait, counted only while this rank was awake, in which another rank waits in an agreement, or
        # has an error that it raised before training.
        self._beside_s = self._error_s = 0.0
        self._waited_s = self._left_s = 0.0  # before another rank has left, and since

    def look(self) -> None:
        """Raise the error with which another rank has ended the job, if one has. Call it now and then while waiting.

        Raises `WorkerLostError` if another rank has left, and the wait goes on as long as it had lasted before: a rank
        that left after its part would have let this one end.
        """
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
        if self._ends and watch.alive.left and error is None:
            self._left_s += awake_s
        else:
            self._waited_s += awake_s
        if self._left_s > max(GONE_S, self._waited_s):
            raise watch.explain(RuntimeError("no answer"), "this rank waits for one that never comes")
        watch.require_all_come()
