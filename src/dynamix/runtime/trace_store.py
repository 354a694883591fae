"""The pheromone field of a training job: counters in the key-value store that torch.distributed's ranks share.

The store can only add whole numbers, so that concurrent deposits can never be lost. Decay is therefore put into the
deposit: one at step t counts (1 - alpha)^-(t - t0), and a reader at step s multiplies the sum by (1 - alpha)^(s - t0)
(forward decay, Cormode et al. 2009). t0 is the first step of the epoch, a stretch of steps in which that factor stays
below 2^12; the key names cell and epoch, and a reader needs the two newest epochs only. A store can die or hang, and
training must not: only a daemon thread talks to it, and `read` waits for it a moment at most.
"""

import contextlib
import math
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError
from dynamix.policies.stigmergic.field import Decay, Floats, checked

RESOLUTION = 2.0**16  # parts of a visit
GROWTH_BITS = 12  # older epochs have faded to 2^-12 and are left out
LARGEST = 64.0  # visits in one deposit: 2^(6+16+12) leaves room for 2^29 of them in an epoch of int64
CLOSE_S = 2.0  # for the store to answer what is under way when a field is closed
_FOREVER = 1 << 40


@dataclass(slots=True)
class _Reading:
    keys: list[str]
    sums: list[int] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


class StoreField:
    """A field in a `torch.distributed.Store` (TCPStore, FileStore, HashStore, PrefixStore): cells (n,).

    patience_s   longest wait of a `read`, seconds. After one that was in vain, reads answer NaN at once until the store
                 has caught up; a lost connection is never taken up again
    backlog      deposits and reads that may wait for the store; further deposits are dropped and counted in `dropped`

    Deposits that are not finite are left out, those beyond +-64 visits cut. All ranks need the same arguments.

    >>> from torch.distributed import HashStore
    >>> traces = StoreField(HashStore(), 2, Decay(alpha=0.5, beta=1.0, start=0.0), patience_s=10)
    >>> traces.deposit([0, 0, 1], [1.0, 2.0, 4.0], step=1)
    >>> traces.read([0, 1], step=2).tolist()
    [1.5, 2.0]
    >>> traces.close()
    """

    def __init__(
        self, store: Any, cells: int, decay: Decay, *, prefix: str = "traces", patience_s: float, backlog: int = 256
    ) -> None:
        if cells < 1 or backlog < 1 or not patience_s >= 0:
            given = (cells, backlog, patience_s)
            raise ConfigError("cells, backlog, patience_s", given, "1, 1, 0 or more", "check the arguments")
        self.decay, self.cells, self.prefix, self.patience_s = decay, cells, prefix, patience_s
        self.dropped = 0
        self.reason: str | None = None
        rate = -math.log1p(-self.decay.alpha) if self.decay.alpha < 1 else math.inf
        self._period = max(1, int(GROWTH_BITS * math.log(2) / rate)) if rate else _FOREVER
        self._swept: int | None = None
        self._store = store
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            self._store = store.clone()  # a connection that others do not wait behind while ours hangs
        self._many = bool(getattr(self._store, "has_extended_api", lambda: False)())
        self._queue: queue.Queue[_Reading | dict[str, int] | None] = queue.Queue(backlog)
        self._late: _Reading | None = None
        self._thread = threading.Thread(target=self._serve, name="dynamix-traces", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the store has never failed; `reason` says how it did."""
        return self.reason is None

    def deposit(self, cell: ArrayLike, amount: ArrayLike = 1.0, *, step: int) -> None:
        index = checked(cell, self.cells).reshape(-1)
        amounts = np.broadcast_to(np.asarray(amount, dtype=np.float64), np.shape(cell)).reshape(-1)
        epoch, age = divmod(step, self._period)
        scale = RESOLUTION / float(self.decay.kept(age))
        adds: dict[str, int] = {}
        for i, visits in zip(index.tolist(), amounts.tolist(), strict=True):
            if math.isfinite(visits):
                key = self._key(i, epoch)
                adds[key] = adds.get(key, 0) + round(max(-LARGEST, min(LARGEST, visits)) * scale)
        self._offer(adds)

    def read(self, cell: ArrayLike, *, step: int) -> Floats:
        index = checked(cell, self.cells)
        unknown = np.full(index.shape, np.nan)
        if not self.alive or (self._late is not None and not self._late.done.is_set()):
            return unknown
        epoch, age = divmod(step, self._period)
        cells = index.reshape(-1).tolist()
        keys = [self._key(i, epoch) for i in cells] + ([self._key(i, epoch - 1) for i in cells] if epoch else [])
        self._late = reading = _Reading(keys)
        if not self._offer(reading) or not reading.done.wait(self.patience_s) or not reading.sums:
            return unknown
        sums = np.zeros((2, len(cells)))
        sums.reshape(-1)[: len(keys)] = reading.sums
        weights = self.decay.kept([age, age + self._period]) * self.decay.beta / RESOLUTION
        return np.asarray(weights @ sums + self.decay.start * self.decay.kept(step)).reshape(index.shape)

    def close(self) -> None:
        """Stop talking to the store; waits `CLOSE_S` for what is under way."""
        # A thread that is inside the store's client when the interpreter ends takes the whole process down.
        self.reason = self.reason or "closed"
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(max(self.patience_s, CLOSE_S))

    def _key(self, cell: int, epoch: int) -> str:
        return f"{self.prefix}/{cell}/{epoch}"

    def _offer(self, work: _Reading | dict[str, int]) -> bool:
        if not self.alive:
            return False
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.dropped += isinstance(work, dict)
            if isinstance(work, _Reading):
                work.done.set()  # nobody will answer it, so the next read may try again
            return False
        return self.alive  # if it failed meanwhile, nobody answers

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None and self.alive:
            try:
                if isinstance(work, _Reading):
                    work.sums = self._sums(work.keys)
                    work.done.set()
                else:
                    for key, count in work.items():
                        self._store.add(key, count)
                    self._sweep(work)
            except Exception as error:  # whatever a store's client raises, training goes on without it
                self.reason = self.reason or f"{type(error).__name__}: {error}"
                self._release(work)
                return

    def _sums(self, keys: list[str]) -> list[int]:
        """The counters. Asking for one that nobody has made yet would wait for it; adding nothing makes it."""
        if self._many and self._store.check(keys):
            return [int(value) for value in self._store.multi_get(keys)]
        return [self._store.add(key, 0) for key in keys]

    def _release(self, work: _Reading | dict[str, int] | None) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(work, _Reading):
                    work.done.set()
                work = self._queue.get_nowait()

    def _sweep(self, adds: dict[str, int]) -> None:
        """Remove the counters of epochs that nobody reads any more, one epoch behind the slowest plausible reader."""
        newest = max((int(key.rpartition("/")[2]) for key in adds), default=0)
        if self._swept is None:
            self._swept = max(newest, 2)
        while self._swept < newest:
            self._swept += 1
            for i in range(self.cells):
                self._store.delete_key(self._key(i, self._swept - 3))
