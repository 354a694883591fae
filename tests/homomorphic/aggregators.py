"""An aggregator in this process, and workers connected to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from dynamix.compression import LocalWire
from dynamix_homomorphic import Aggregator, AggregatorWire
from dynamix_homomorphic.aggregator.client import AggregatorClient
from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.server import AggregatorServer

SMALL = AggregatorLimits(chunk_bytes=4096, window=4)
TOKEN = "a token of enough length"


def join(server: AggregatorServer, workers: int, session: str = "s", timeout_s: float = 20.0) -> list[AggregatorClient]:
    where = Aggregator(server.address, timeout_s=timeout_s)
    return [AggregatorClient.connect(where, session=session, workers=workers, rank=rank) for rank in range(workers)]


def join_wires(
    server: AggregatorServer, workers: int, session: str = "s", timeout_s: float = 20.0
) -> list[AggregatorWire]:
    connected = join(server, workers, session, timeout_s)
    return [AggregatorWire(client, spare) for client, spare in zip(connected, LocalWire.make(workers), strict=True)]


def eventually(truth: Callable[[], bool]) -> None:
    """Counting goes on after workers have been told."""
    deadline = time.monotonic() + 20
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.01)
