"""How live workers reach each other: gossip over UDP, models over plain TCP. Nothing here waits for ever.

Every worker tells one other, drawn at random, several times a second what it knows, and is answered. All of it can be
joined in any order: traces, the announced end of the latest round, when each worker was last heard of.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from dynamix.errors import StateError
from dynamix.window import Ints
from dynamix_lab.suites.gossip.traces import End, GossipedTraces, later

PORT = 5100  # and one more for each worker, of UDP and of TCP
TICK_S = 0.1
ALIVE_S = 1.0  # heard of within so long
CONNECT_S, SEND_S = 0.3, 6.0
ASK, ANSWER, PROGRESS = b"a", b"b", b"p"
_GOSSIP, _PROGRESS, _MODEL = struct.Struct("<cHqd"), struct.Struct("<cHqqd"), struct.Struct("<HqHQdd")


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a worker brings to meeting `number`, or has after it.

    ledger      samples by worker that are in the model (W,)
    model       its parameters, float32, one after the other
    speed       samples a second of the worker while it computes
    meeting_s   what the last meeting took it; NaN where that is not known
    """

    worker: int
    number: int
    ledger: Ints
    model: bytes
    speed: float = float("nan")
    meeting_s: float = float("nan")


@dataclass(frozen=True, slots=True)
class Published:
    """What Hivemind's tracker publishes: round, samples of it so far, samples a second, and when it was said."""

    number: int
    samples: int
    speed: float
    at: float


class PeerSockets:
    """One worker's sockets and what it has heard.

    addresses   of all workers that may ever be there, by number
    number      of the round under way
    end         when it ends, in this process' monotonic time; infinite where that is not known
    shares_end  whether ends are announced to others, and theirs followed
    """

    def __init__(self, worker: int, addresses: Sequence[str], *, seed: int = 0, shares_end: bool = True) -> None:
        self.worker, self.addresses, self.shares_end = worker, addresses, shares_end
        self.number, self.end, self.traces = 0, float("inf"), GossipedTraces()
        self.announced: End = (0, float("inf"))
        self.progress: dict[int, Published] = {}
        self.latest = b""
        self.messages = self.sent_bytes = 0
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._arrived: dict[int, dict[int, Contribution]] = {}
        self._heard, self._done = np.full(len(addresses), -np.inf), -1
        self._random, self._closed = random.Random(f"{seed}/{worker}"), threading.Event()
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((addresses[worker], PORT + worker))
        self._tcp = socket.create_server((addresses[worker], PORT + worker), backlog=64)
        self._senders = ThreadPoolExecutor(max(len(addresses) - 1, 1), thread_name_prefix="send")
        for loop in (self._receive, self._tell, self._accept):
            threading.Thread(target=self._until_closed(loop), daemon=True).start()

    def close(self) -> None:
        """Stops talking."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._tcp.shutdown(socket.SHUT_RDWR)
        self._udp.close()
        self._tcp.close()
        self._senders.shutdown(wait=False, cancel_futures=True)

    def alive(self) -> list[int]:
        """The other workers that were heard of lately."""
        since = time.monotonic() - ALIVE_S
        with self.lock:
            return [w for w in range(len(self.addresses)) if w != self.worker and self._heard[w] > since]

    def begin(self, number: int, end: float) -> None:
        """A round begins: what is known of another's end of it holds, where that is sooner."""
        with self.lock:
            self.number, self.end = number, end
            if self.shares_end:
                self.announced = later(self.announced, (number, end))
                self._follow()

    def called(self) -> int | None:
        """The latest meeting that others have begun and this worker has not been at."""
        with self.lock:
            numbers = [number for number, found in self._arrived.items() if found and number >= self.number]
            return max(numbers, default=None)

    def keep(self, given: Contribution) -> None:
        """What `fetch` of others gets."""
        self.latest = _packed(given)

    def send(self, given: Contribution, to: Sequence[int]) -> float:
        """Give a contribution to workers `to`, all at once; seconds until the last of them has it or has failed."""
        began = time.monotonic()
        message = _packed(given)
        running = [self._senders.submit(self._give, message, worker) for worker in to]
        for future in running:
            future.result()
        return time.monotonic() - began

    def fetch(self, worker: int) -> Contribution | None:
        """The model that another worker had after its last meeting; None where it cannot be had."""
        ask = _MODEL.pack(self.worker, 0, 0, 0, 0.0, 0.0)
        with contextlib.suppress(OSError, struct.error):
            address = (self.addresses[worker], PORT + worker)
            with socket.create_connection(address, CONNECT_S) as connection:
                connection.settimeout(SEND_S)
                connection.sendall(ask)
                return _unpacked(connection)
        return None

    def gathered(self, number: int, patience_s: float) -> list[Contribution]:
        """What others bring to meeting `number`: of all who live, or of who came within `patience_s`."""
        until = time.monotonic() + patience_s
        with self.changed:
            while True:
                here = self._arrived.get(number, {})
                left = until - time.monotonic()
                if left <= 0 or all(worker in here for worker in self.alive()):
                    break
                self.changed.wait(min(left, TICK_S))
            for old in [known for known in self._arrived if known <= number]:
                del self._arrived[old]
            self._done = number
            return list(here.values())

    def publish(self, samples: int, speed: float) -> None:
        """Tell everybody how far this worker is, as to a table that all share."""
        with self.lock:
            message = _PROGRESS.pack(PROGRESS, self.worker, self.number, samples, speed)
            self.progress[self.worker] = Published(self.number, samples, speed, time.monotonic())
        for worker in range(len(self.addresses)):
            if worker != self.worker:
                self._send(message, worker)

    def _until_closed(self, loop: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            while not self._closed.is_set():
                # What a broken link does to a socket is no news here: who is silent is left out.
                with contextlib.suppress(OSError):
                    loop()

        return work

    def _tell(self) -> None:
        self._closed.wait(TICK_S * self._random.uniform(0.8, 1.2))
        other = self._random.randrange(len(self.addresses) - 1)
        self._send(self._message(ASK), other + (other >= self.worker))

    def _message(self, kind: bytes) -> bytes:
        with self.lock:
            now = time.monotonic()
            number, end = self.announced
            ages = np.clip((now - self._heard) * 10, 0, 255).astype(np.uint8)
            ages[self.worker] = 0
            return _GOSSIP.pack(kind, self.worker, number, end - now) + ages.tobytes() + self.traces.message()

    def _send(self, message: bytes, worker: int) -> None:
        with contextlib.suppress(OSError):
            self._udp.sendto(message, (self.addresses[worker], PORT + worker))
            self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + len(message)

    def _receive(self) -> None:
        message, _ = self._udp.recvfrom(65536)
        now, kind = time.monotonic(), message[:1]
        with contextlib.suppress(struct.error, StateError, ValueError), self.changed:
            if kind == PROGRESS:
                _, sender, number, samples, speed = _PROGRESS.unpack(message)
                self.progress[sender] = Published(number, samples, speed, now)
                self._heard[sender] = now
            elif kind in (ASK, ANSWER):
                sender = self._join(message, now)
                if kind == ASK:
                    self._send(self._message(ANSWER), sender)

    def _join(self, message: bytes, now: float) -> int:
        _, sender, number, left = _GOSSIP.unpack_from(message)
        after = _GOSSIP.size + len(self.addresses)
        ages = np.frombuffer(message, np.uint8, len(self.addresses), _GOSSIP.size)
        seen = np.where(ages < 255, now - ages / 10, -np.inf)
        self._heard = np.maximum(self._heard, seen)
        self._heard[sender] = now
        self.traces.join(message[after:])
        if self.shares_end:
            self.announced = later(self.announced, (number, now + left))
            self._follow()
        return int(sender)

    def _follow(self) -> None:
        number, end = self.announced
        if number == self.number:
            self.end = min(self.end, end)
        elif number >= self.number + 2:
            self.number, self.end = number, end

    def _accept(self) -> None:
        connection, _ = self._tcp.accept()
        threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, struct.error):
            connection.settimeout(SEND_S)
            given = _unpacked(connection)
            if not given.model:  # somebody asks for ours
                connection.sendall(self.latest)
                return
            connection.sendall(b"k")
            with self.changed:
                if given.number > self._done:
                    self._arrived.setdefault(given.number, {})[given.worker] = given
                self._heard[given.worker] = time.monotonic()
                self.changed.notify_all()

    def _give(self, message: bytes, worker: int) -> None:
        with contextlib.suppress(OSError):
            address = (self.addresses[worker], PORT + worker)
            with socket.create_connection(address, CONNECT_S) as connection:
                connection.settimeout(SEND_S)
                connection.sendall(message)
                connection.recv(1)


def _packed(given: Contribution) -> bytes:
    sizes = len(given.ledger), len(given.model)
    head = _MODEL.pack(given.worker, given.number, *sizes, given.speed, given.meeting_s)
    return head + given.ledger.astype("<i8").tobytes() + given.model


def _unpacked(connection: socket.socket) -> Contribution:
    worker, number, workers, size, *told = _MODEL.unpack(_exactly(connection, _MODEL.size))
    ledger = np.frombuffer(_exactly(connection, 8 * workers), "<i8").astype(np.int64)
    return Contribution(worker, number, ledger, _exactly(connection, size), *told)


def _exactly(connection: socket.socket, size: int) -> bytes:
    return b"".join(_parts(connection, size))


def _parts(connection: socket.socket, size: int) -> Iterator[bytes]:
    while size:
        part = connection.recv(min(size, 1 << 16))
        if not part:
            raise OSError("the connection ended early")
        size -= len(part)
        yield part
