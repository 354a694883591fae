"""Workers that ask as much of an aggregator as they can: one thread, no arithmetic while time is taken.

What a worker sends is made beforehand, checksums of its chunks included, and of what comes back one worker's part of
each round is compared with the exact sum. So the process that answers is what is measured.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import DynamixError
from dynamix_homomorphic.aggregator.protocol import ADD, HEADER, RESULT, Bytes, Head, chunks, folded, pack
from dynamix_homomorphic.aggregator.tls import WOULD_BLOCK, send_both

SILENT_S = 30.0  # without a byte in either direction: something hangs


class WrongSum(Exception):
    """What came back is not the sum of what was brought."""


def buffers(workers: int, total_bytes: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What each worker brings, int32 (workers, n), and the sum, int32 (n,) wrapping around."""
    generator = np.random.default_rng(seed)
    brought = generator.integers(-(2**31), 2**31, (workers, total_bytes // 4), dtype=np.int32)
    return brought, brought.sum(0, dtype=np.int32)


@dataclass(frozen=True)
class Prepared:
    """One worker's buffer in chunks: of each where it belongs, its bytes, and what its checksum is taken of."""

    parts: Sequence[tuple[Head, Bytes, bytes]]

    @classmethod
    def of(cls, values: NDArray[np.int32], chunk_bytes: int) -> Prepared:
        payload: Bytes = values.view(np.uint8)
        heads = chunks(ADD, 0, payload.size, chunk_bytes)
        cut = [(head, payload[head.start : head.start + head.length]) for head in heads]
        return cls([(head, part, bytes(folded(part))) for head, part in cut])


class LoadConnection:
    """One worker: how far it has sent and received. `expected`: the sum, where its results are compared."""

    def __init__(self, sock: socket.socket, prepared: Prepared, rounds: int, expected: Bytes | None) -> None:
        self.sock, self._parts, self._rounds, self._expected = sock, prepared.parts, rounds, expected
        self.left = rounds * len(prepared.parts)  # messages to receive
        self._place = self._sent = 0
        self._header = b""
        longest = HEADER.size + max(head.length for head, _, _ in prepared.parts)
        self._incoming = np.empty(longest, np.uint8)
        self._view, self._got, self._result = self._incoming.data, 0, 0

    def send(self) -> bool:
        """As much of one message as goes; whether all is sent."""
        number, at = divmod(self._place, len(self._parts))
        if number == self._rounds:
            return True
        head, payload, fold = self._parts[at]
        if not self._sent:
            self._header = pack(head._replace(round=number), payload, fold=fold)
        try:
            if self._sent < HEADER.size:
                self._sent += send_both(self.sock, self._header[self._sent :], payload.data)
            else:
                self._sent += self.sock.send(payload.data[self._sent - HEADER.size :])
        except WOULD_BLOCK:
            return False
        if self._sent == HEADER.size + head.length:
            self._place, self._sent = self._place + 1, 0
        return False

    def receive(self) -> None:
        """All that is there. Raises `WrongSum`."""
        while self.left:
            head, _, _ = self._parts[self._result % len(self._parts)]
            whole = HEADER.size + head.length
            try:
                got = self.sock.recv_into(self._view[self._got : whole])
            except WOULD_BLOCK:
                return
            if not got:
                raise ConnectionError("the other side closed the connection")
            self._got += got
            if self._got == whole:
                self._compare(head)
                self._got, self._result, self.left = 0, self._result + 1, self.left - 1

    def _compare(self, head: Head) -> None:
        if self._expected is None:
            return
        due = head._replace(kind=RESULT, round=self._result // len(self._parts))
        payload = self._incoming[HEADER.size : HEADER.size + head.length]
        wanted = self._expected[head.start : head.start + head.length]
        if bytes(self._view[: HEADER.size]) != pack(due, payload) or not np.array_equal(payload, wanted):
            raise WrongSum(f"{due} does not hold the sum of what was brought")


def drive(connections: Sequence[LoadConnection]) -> float:
    """Send and receive everything; seconds. Raises `DynamixError` where nothing moves."""
    poll = select.epoll()
    by_number = {connection.sock.fileno(): connection for connection in connections}
    both = select.EPOLLIN | select.EPOLLOUT
    for number in by_number:
        poll.register(number, both)
    waiting = set(by_number)
    began = time.perf_counter()
    try:
        while waiting:
            events = poll.poll(SILENT_S)
            if not events:
                raise DynamixError(f"nothing moved for {SILENT_S:.0f} s with {len(waiting)} workers waiting")
            for number, event in events:
                connection = by_number[number]
                if event & select.EPOLLOUT and connection.send():
                    poll.modify(number, select.EPOLLIN)
                if event & ~select.EPOLLOUT:
                    connection.receive()
                    if not connection.left and number in waiting:
                        waiting.discard(number)
                        poll.unregister(number)
        return time.perf_counter() - began
    finally:
        poll.close()
