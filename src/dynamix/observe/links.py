"""Measures this rank's connections to other ranks, to find the slow one."""

from __future__ import annotations

import time
from typing import Any

from dynamix.probes.network import Connection, ends, master_port, open_connections, ports

SAMPLE_EVERY_S = 2.0
_MOST = 64  # connections reported: those that carried most
_LEAST_BYTES = 65_536  # between two samples; with fewer, a rate has no meaning


class Links:
    """Samples the process's connections at intervals; `told` is the latest list for the rank's file.

    Each connection has its two ends (addresses), payload bytes sent and its round trip: the median of the kernel's
    values at the samples. The list is empty if nothing is visible: NVLink, InfiniBand and shared memory are no
    connections.
    """

    def __init__(self) -> None:
        self._port = master_port()
        self._known: dict[int, dict[str, Any]] = {}
        self._trips: dict[int, list[float]] = {}
        self._before: dict[int, Connection] = {}
        self._due_s = 0.0

    def sample(self) -> None:
        """Take a sample, unless the last one is recent."""
        now = time.monotonic()
        if now < self._due_s:
            return
        self._due_s = now + SAMPLE_EVERY_S
        for key, (fd, connection) in open_connections().items():
            if key not in self._known:
                if self._port in ports(fd):  # the rendezvous store
                    continue
                local, remote = ends(fd)
                if local[4:] == remote[4:]:  # both ends on one host: its times say nothing about a link
                    continue
                self._known[key] = {"local": local, "remote": remote}
            sent = connection.since(self._before.get(key)).sent_bytes
            self._before[key] = connection
            if sent >= _LEAST_BYTES:
                self._trips.setdefault(key, []).append(connection.rtt_s)
                del self._trips[key][:-100]

    @property
    def told(self) -> list[dict[str, Any]]:
        """`local`, `remote`, `sent_bytes` and `rtt_s` of those that carried most, in both directions.

        `rtt_s` is None if this end sent little: its peer knows it.
        """
        found = []
        for key, ends_of in self._known.items():
            trips, carried = sorted(self._trips.get(key, [])), self._before[key]
            rtt_s = trips[len(trips) // 2] if trips else None
            found.append((carried.moved_bytes, {**ends_of, "sent_bytes": carried.sent_bytes, "rtt_s": rtt_s}))
        found.sort(key=lambda one: -one[0])
        return [link for _, link in found[:_MOST]]
