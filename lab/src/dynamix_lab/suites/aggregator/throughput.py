"""What one core of an aggregator carries, beside its line and its memory, measured in turns in the same run.

The line is an echo on the same core: a process that sends back what every connection brought, by the same calls. Memory
is the rate at which that core copies arrays larger than its caches.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil

from dynamix_homomorphic.aggregator.handshake import NONCE_BYTES, PLAIN, Introduction, introduce
from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.protocol import Bytes, parse_address
from dynamix_homomorphic.aggregator.tls import TlsFiles
from dynamix_lab.suites.aggregator.load import LoadConnection, Prepared, buffers, drive
from dynamix_lab.suites.aggregator.serving import TOKEN

TLS = " over TLS"
KINDS = ("echo", "aggregator", f"echo{TLS}", f"aggregator{TLS}")
MEMORY_BYTES = 1 << 26  # of an array: beyond the caches
WAIT_S = 60.0


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """This thread on one core, where the system allows it."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores() -> tuple[int, int]:
    """For what answers, and for the load; the same one where there is no other."""
    known = sorted(os.sched_getaffinity(0))
    return known[0], known[-1]


@contextlib.contextmanager
def answering(kind: str, files: TlsFiles | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of what answers."""
    what = [kind.removesuffix(TLS)]
    more = [] if files is None else [files.cert, files.key, files.ca]
    command = [sys.executable, "-m", "dynamix_lab.suites.aggregator.serving", *what, str(cores()[0]), *more]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.kill()
        process.communicate()


def connected(kind: str, address: str, workers: int, files: TlsFiles | None) -> list[socket.socket]:
    """Sockets of all workers of a new job, let in."""
    session, made = secrets.token_hex(8), []
    context = files.client() if files else None
    for rank in range(workers):
        deadline = time.monotonic() + WAIT_S
        sock = socket.create_connection(parse_address(address), timeout=WAIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=parse_address(address)[0])
        if kind.startswith("aggregator"):
            if context is None:
                sock.sendall(PLAIN)
            who = Introduction("bench", session, workers, rank, WAIT_S)
            introduce(sock, who, TOKEN, secrets.token_bytes(NONCE_BYTES), deadline)
        sock.setblocking(False)
        made.append(sock)
    return made


class Contender:
    """One thing that answers, measured again and again."""

    def __init__(self, kind: str, address: str, process: psutil.Process, files: TlsFiles | None) -> None:
        self.kind, self.address, self.process, self.files = kind, address, process, files
        self.rounds = 1

    def measure(
        self, prepared: Sequence[Prepared], expected: Bytes, total_bytes: int, seconds: float
    ) -> dict[str, float]:
        """Bytes of all workers' buffers a second, by the clock and a second of the answering process's processor.

        `rounds` follows the speed of the one before, so that the next one takes about `seconds`.
        """
        sockets = connected(self.kind, self.address, len(prepared), self.files)
        compared = [
            expected if self.kind.startswith("aggregator") and rank == 0 else None for rank in range(len(prepared))
        ]
        connections = [
            LoadConnection(sock, one, self.rounds, wanted)
            for sock, one, wanted in zip(sockets, prepared, compared, strict=True)
        ]
        before = self._cpu_s()
        took_s = drive(connections)
        spent_s = self._cpu_s() - before
        for sock in sockets:
            sock.close()
        carried = len(prepared) * total_bytes * self.rounds
        self.rounds = max(1, round(self.rounds * min(seconds / took_s, 100)))
        return {"by_clock": carried / took_s, "by_core": carried / max(spent_s, 0.01), "busy": spent_s / took_s}

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def memory_copy(seconds: float) -> float:
    """Bytes a second that the answering core copies from one array to another."""
    with on_core(cores()[0]):
        one, other = np.ones((2, MEMORY_BYTES // 4), np.int32)
        np.copyto(other, one)
        began, copied = time.perf_counter(), 0
        while (took_s := time.perf_counter() - began) < seconds or not copied:
            np.copyto(other, one)
            copied += one.nbytes
        return copied / took_s


def throughput(
    workers: int, *, total_bytes: int, repeats: int, seconds: float, tls: tuple[TlsFiles, TlsFiles] | None = None
) -> dict[str, Any]:
    """Rates of all contenders in turns, medians over `repeats`.

    total_bytes   of one worker's buffer
    tls           files of the aggregator and of its workers, for a turn over TLS

    bytes_per_s             all workers' buffers, by the clock
    bytes_per_core_s        by a second of the answering process's processor
    busy                    part of the time in which it computed: at 1 it is what limits
    of_line, of_line_core   beside the echo of the same turn, with or without TLS alike; by the clock and by the core
    of_memory               per core, beside copying memory
    """
    brought, total = buffers(workers, total_bytes)
    prepared = [Prepared.of(values, AggregatorLimits().chunk_bytes) for values in brought]
    kinds = KINDS if tls else KINDS[:2]
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    copies: list[float] = []
    with contextlib.ExitStack() as stack:
        contenders = []
        for kind in kinds:
            servers, clients = tls if tls and kind.endswith(TLS) else (None, None)
            address, process = stack.enter_context(answering(kind, servers))
            contenders.append(Contender(kind, address, process, clients))
        stack.enter_context(on_core(cores()[1]))
        for turn in range(-1, repeats):  # the first finds out how many rounds fill the time
            if turn >= 0:
                copies.append(memory_copy(seconds / 4))
            for contender in contenders:
                found = contender.measure(prepared, total.view(np.uint8), total_bytes, seconds)
                if turn >= 0:
                    turns[contender.kind].append(found)
    return {
        "workers": workers,
        "buffer_bytes": total_bytes,
        "memory_copy_bytes_per_s": round(statistics.median(copies)),
        "contenders": {kind: _summary(found, turns[_line_of(kind)], copies) for kind, found in turns.items()},
    }


def _line_of(kind: str) -> str:
    return kind.replace("aggregator", "echo")


def _summary(found: list[dict[str, float]], line: list[dict[str, float]], copies: list[float]) -> dict[str, float]:
    def beside(name: str) -> float:
        return statistics.median(one[name] / other[name] for one, other in zip(found, line, strict=True))

    of_memory = statistics.median(one["by_core"] / copy for one, copy in zip(found, copies, strict=True))
    return {
        "bytes_per_s": round(statistics.median(one["by_clock"] for one in found)),
        "bytes_per_core_s": round(statistics.median(one["by_core"] for one in found)),
        "busy": round(statistics.median(one["busy"] for one in found), 3),
        "of_line": round(beside("by_clock"), 3),
        "of_line_core": round(beside("by_core"), 3),
        "of_memory": round(of_memory, 3),
    }
