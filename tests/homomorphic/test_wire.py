"""The wire through an aggregator passes the suite of every wire."""

from __future__ import annotations

from dynamix.compression import LocalWire
from dynamix_homomorphic import Aggregator, AggregatorWire
from dynamix_homomorphic.aggregator.client import AggregatorClient
from dynamix_homomorphic.aggregator.server import AggregatorServer
from tests.compression.local import in_threads
from tests.compression.test_wire import WORKERS, check, use


def test_aggregator() -> None:
    with AggregatorServer() as server:
        where, spare = Aggregator(server.address), LocalWire.make(WORKERS)
        clients = [AggregatorClient.connect(where, session="s", workers=WORKERS, rank=rank) for rank in range(WORKERS)]
        for found in in_threads([AggregatorWire(*both) for both in zip(clients, spare, strict=True)], use):
            check(found)
