"""A job's connection to its aggregator. All ranks lose it, wait for it and join it again together.

A rank never decides on what it alone observes. The vote on a bucket tells all ranks of a loss. Whether the aggregator
answers again is agreed over the process group, at steps that all ranks count alike.
"""

from __future__ import annotations

import logging
import socket
import threading

import torch
import torch.distributed as dist

from dynamix.compression.ways import AGGREGATED
from dynamix.compression.wire import Wire
from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.client import Aggregator, AggregatorClient
from dynamix_homomorphic.aggregator.protocol import parse_address
from dynamix_homomorphic.aggregator.wire import AggregatorWire, join, report_loss

ASK_EVERY = 32  # exchanges between agreements on whether all ranks reach it
MOST_BETWEEN = 4096  # exchanges: each loss and each failed attempt doubles the wait up to this
GOOD = 8  # waits without a loss after which the wait is halved
LOOK_S = 1.0  # how often a rank tries to connect
KNOCK_S = 2.0  # how long it waits for an answer
CANDIDATES = ("gather", "blocks", "compaction", f"{AGGREGATED}compaction", f"{AGGREGATED}lhc-one-phase")
_log = logging.getLogger(__name__)


class Backoff:
    """How many exchanges lie between two agreements on whether the aggregator is back.

    Each loss and failed attempt doubles it, so that an unreliable connection is tried less often. After `GOOD` times as
    many exchanges through the aggregator without a loss it is halved, so that a bad hour is forgotten.

    >>> waits = Backoff()
    >>> waits.longer(), waits.longer()
    (64, 128)
    >>> for _ in range(GOOD * 128):
    ...     waits.went_well()
    >>> waits.between
    64
    """

    def __init__(self) -> None:
        self.between, self._good = ASK_EVERY, 0

    def longer(self) -> int:
        """Record a loss or a failed attempt. Returns the new wait."""
        self.between, self._good = min(2 * self.between, MOST_BETWEEN), 0
        return self.between

    def went_well(self) -> None:
        """Record one exchange through the aggregator."""
        self._good += 1
        if self._good >= GOOD * self.between:
            self.between, self._good = max(self.between // 2, ASK_EVERY), 0


class AggregatorLink:
    """One rank's connection. Making it and `look` are collective calls; all ranks call `wire` and `lost` in step.

    where   "host:port" or an `Aggregator`
    """

    candidates: tuple[str, ...] = CANDIDATES

    def __init__(self, where: str | Aggregator, group: dist.ProcessGroup, device: torch.device) -> None:
        self.where = Aggregator(where) if isinstance(where, str) else where
        self._group, self._device = group, device
        self.client: AggregatorClient | None = join(self.where, group, device)
        self._backoff, self._waited = Backoff(), 0
        self._seen, self._leave = threading.Event(), threading.Event()

    @property
    def away(self) -> bool:
        """Whether the process group forms the sums at present."""
        return self.client is None

    def wire(self, reserve: Wire) -> Wire:
        """The wire that sums the next bucket: the aggregator with `reserve` as fallback, or `reserve` alone."""
        if self.client is None:
            return reserve
        self._backoff.went_well()  # `lost` undoes this
        return AggregatorWire(self.client, reserve)

    def lost(self) -> None:
        """Leave after a loss that all ranks have agreed on, and begin to look for the aggregator."""
        assert self.client is not None
        report_loss(self.client)
        self.client = None
        agreed = torch.tensor([self._backoff.between], device=self._device)  # equal already; this ensures it
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._group)
        self._backoff.between = int(agreed[0])
        self._wait_longer()

    def look(self) -> bool:
        """Call once per exchange while it is away. Returns whether all ranks have just joined again."""
        self._waited += 1
        if self._waited < self._backoff.between:
            return False
        self._waited = 0
        seen = torch.tensor([self._seen.is_set()], dtype=torch.uint8, device=self._device)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=self._group)
        if not bool(seen[0]):
            return False
        try:
            self.client = join(self.where, self._group, self._device, patience_s=KNOCK_S)
        except ConfigError as error:
            _log.info("the aggregator answers, but not all ranks are in: %s", error)
            self._wait_longer()
            return False
        self._leave.set()
        _log.warning("the aggregator is back: sums are formed there again")
        return True

    def _wait_longer(self) -> None:
        self._leave.set()
        self._seen, self._leave = threading.Event(), threading.Event()
        self._waited = 0
        self._backoff.longer()
        arguments = (self.where.address, self._seen, self._leave)
        threading.Thread(target=_watch, args=arguments, name="dynamix-aggregator-watch", daemon=True).start()


def _watch(address: str, seen: threading.Event, leave: threading.Event) -> None:
    """Set `seen` when `address` accepts a connection. Return then, or when `leave` is set."""
    while not leave.wait(LOOK_S):
        try:
            socket.create_connection(parse_address(address), timeout=KNOCK_S).close()
        except OSError:
            continue
        seen.set()
        return
