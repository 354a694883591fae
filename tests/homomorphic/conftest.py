"""Fixtures shared by the tests of the compression."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynamix_homomorphic.aggregator.server import AggregatorServer
from tests.homomorphic.aggregators import SMALL


@pytest.fixture
def server() -> Iterator[AggregatorServer]:
    """An aggregator with small chunks, so that little data makes many of them."""
    with AggregatorServer(limits=SMALL) as running:
        yield running
