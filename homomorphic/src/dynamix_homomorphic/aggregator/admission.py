"""Admission to the aggregator: unfinished handshakes, and limits for each address."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.tls import shut


def origin(peer: str) -> str:
    """The key by which an address is limited: an IPv4 host, or an IPv6 /64, because one host is assigned a whole /64.

    >>> origin("10.0.0.7"), origin("::ffff:10.0.0.7"), origin("2001:db8::1") == origin("2001:db8::ff")
    ('10.0.0.7', '10.0.0.7', True)
    """
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Greeting:
    """A connection that has not yet introduced itself."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.address = sock, address


class Greetings:
    """All such connections. If there are too many, the oldest is closed, so silent connections block no worker.

    most          the limit in all; one more closes the oldest. A worker finishes its handshake long before that
    per_address   the limit of one address; one more closes the oldest of that address
    """

    def __init__(self, most: int, per_address: int) -> None:
        self.most, self.per_address = most, per_address
        self._all: dict[Greeting, None] = {}  # oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, sock: socket.socket, address: str) -> Greeting:
        """Add a connection; close the oldest if there are too many."""
        made = Greeting(sock, address)
        with self._lock:
            same = [one for one in self._all if one.address == address]
            if len(same) >= self.per_address:
                self._end(same[0])
            elif len(self._all) >= self.most:
                self._end(next(iter(self._all)))
            self._all[made] = None
        return made

    def done(self, greeting: Greeting) -> None:
        """The handshake has succeeded or failed: the connection no longer counts."""
        with self._lock:
            self._all.pop(greeting, None)

    def _end(self, greeting: Greeting) -> None:
        del self._all[greeting]
        shut(greeting.sock)  # its thread notices the end, counts it and closes


def beyond(
    limits: AggregatorLimits, here: Mapping[Any, Sequence[str]], job: Any, workers: int, address: str
) -> str | None:
    """The limit that one more worker of `address` would exceed, in a job that announces `workers`. None if it fits.

    here    addresses of the connected workers, by job

    >>> beyond(AggregatorLimits(workers=2), {}, "a", 3, "10.0.0.7")
    '3 workers are too many: allowed are 2 a job'
    """
    came = here.get(job, ())
    if workers > limits.workers:
        return f"{workers} workers are too many: allowed are {limits.workers} a job"
    if not came and len(here) >= limits.jobs:
        return f"no more than {limits.jobs} jobs at once: start it with a higher --jobs"
    if not came and sum(first == address for first, *_ in here.values()) >= limits.jobs_per_address:
        text = f"no more than {limits.jobs_per_address} jobs of one address at once"
        return f"{text}: start it with a higher --jobs-per-address"
    if sum(every.count(address) for every in here.values()) >= limits.connections_per_address:
        text = f"no more than {limits.connections_per_address} workers of one address at once"
        return f"{text}: start it with a higher --connections-per-address"
    one = limits.job_bytes(1) - limits.job_bytes(0)
    # A new job must fit as a whole, but memory is reserved worker by worker.
    needed = one if came else limits.job_bytes(workers)
    if needed > (left := limits.memory_bytes - sum(limits.job_bytes(len(every)) for every in here.values())):
        text = f"{workers} workers need {limits.job_bytes(workers)} bytes, {left} are left"
        return f"{text}: start it with a higher --memory-mb"
    taken = {key: one * every.count(address) for key, every in here.items()}
    taken |= {key: taken[key] + limits.job_bytes(0) for key, every in here.items() if every[0] == address}
    most, own = int(limits.address_share * limits.memory_bytes), taken.pop(job, 0)
    others = sum(taken.values())
    if others and others + own + (one if came else limits.job_bytes(1)) > most:
        text = f"workers of one address have {others + own} bytes, and may have {most}"
        return f"{text}: start it with a higher --memory-mb"
    return None
