"""How long a worker waits at the door of an aggregator where many connections say nothing."""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

from dynamix_homomorphic.aggregator.protocol import parse_address
from dynamix_homomorphic.aggregator.tls import TlsFiles
from dynamix_lab.suites.aggregator.throughput import answering, connected

IDLE, WORKERS = 300, 20


def waiting(tls: tuple[TlsFiles, TlsFiles] | None) -> dict[str, Any]:
    """Seconds from connecting to being let in, of single workers one after another: the longest, and the median.

    tls   files of the aggregator and of its workers; None: without TLS
    """
    servers, clients = tls or (None, None)
    with answering("aggregator", servers) as (address, _):
        connected("aggregator", address, 1, clients)[0].close()  # the first loads code
        silent = [socket.create_connection(parse_address(address), timeout=60) for _ in range(IDLE)]
        seconds = []
        for _ in range(WORKERS):
            began = time.perf_counter()
            sock = connected("aggregator", address, 1, clients)[0]
            seconds.append(time.perf_counter() - began)
            sock.close()
        for one in silent:
            one.close()
    return {"idle": IDLE, "median_s": round(statistics.median(seconds), 5), "longest_s": round(max(seconds), 5)}
