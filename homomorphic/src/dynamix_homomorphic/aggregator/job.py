"""One job's rounds on the aggregator: chunks of all its workers are summed or ORed as they arrive, and sent back.

The aggregator never decodes, and needs no gradient's length: it holds chunks. The first worker's chunk is kept, the
other workers' chunks are combined into it, and after the last one the result goes to all. A worker may be at most
`window` chunks ahead of the last result that it has received. Beyond that the aggregator stops reading, and TCP waits.

A result is sent only after every worker's chunk has arrived whole and undamaged. Any failure ends the job for all of
its workers at once. Other jobs continue.
"""

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator import protocol
from dynamix_homomorphic.aggregator.protocol import ADD, HEADER, OR, Bytes, Head, ProtocolError
from dynamix_homomorphic.aggregator.tls import WOULD_BLOCK, buffered, explained, shut

_PAD = -HEADER.size % 64  # aligns payloads to words, which halves the time of their checksums


@dataclass(frozen=True)
class AggregatorLimits:
    """The limits of an aggregator. A job that asks for more is refused, or ended if it asks within a round.

    chunk_bytes     the largest chunk; a multiple of 4
    window          how many chunks a worker may be ahead
    memory_bytes    for the chunks of all jobs together; one job may need `job_bytes`
    round_bytes     the largest buffer
    timeout_s       the longest time that a job may wait for one of its workers; jobs may ask for less
    handshakes      unfinished handshakes, in all and of one address; beyond it the oldest is closed
    jobs_per_address   jobs opened by workers of one address
    connections_per_address   workers of one address, in all jobs
    address_share   the part of `memory_bytes` that workers of one address may use; a job alone may use all
    """

    jobs: int = 16
    jobs_per_address: int = 8
    handshakes: int = 512
    handshakes_per_address: int = 256
    connections_per_address: int = 512
    address_share: float = 0.5
    workers: int = 256
    chunk_bytes: int = 1 << 19
    window: int = 8
    memory_bytes: int = 1 << 30
    round_bytes: int = 1 << 32
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"limits.{name}", value, "more than 0", "leave it out for the default")
        if self.chunk_bytes % 4:
            raise ConfigError("limits.chunk_bytes", self.chunk_bytes, "multiples of 4", "chunks hold whole int32")

    def job_bytes(self, workers: int) -> int:
        """The most bytes that a job of so many workers can hold: chunks partly combined, chunks not sent yet, and one
        chunk being received from each worker."""
        return (2 * self.window + workers) * (self.chunk_bytes + HEADER.size)


class Failure(Exception):
    """This job cannot continue. `kind` is the category for counters: left, stalled, damaged, order, mixed, limit."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class _Block:
    """A buffer for one message. `left` counts the workers to which it has not been sent yet."""

    __slots__ = ("bytes", "head", "left", "present", "view")

    def __init__(self, size: int) -> None:
        self.bytes: Bytes = np.empty(_PAD + size, np.uint8)[_PAD:]
        self.view = self.bytes.data
        self.head = Head(0, 0, 0, 0, 0, 0)
        self.left = self.present = 0

    @property
    def payload(self) -> Bytes:
        return self.bytes[HEADER.size : HEADER.size + self.head.length]


class _Worker:
    """One rank's connection: the message being received, the queue to send, and its progress."""

    def __init__(self, rank: int, sock: socket.socket, block: _Block, now_s: float) -> None:
        self.rank, self.sock, self.block = rank, sock, block
        self.filled = 0  # bytes of the message being received
        self.given = 0  # chunks contributed since the job began
        self.due: Head | None = None  # the next chunk of a round that has begun
        self.rounds = 0
        self.queue: deque[_Block] = deque()
        self.sent = 0  # bytes of the first block in the queue
        self.heard_s = self.took_s = now_s
        self.events = 0
        self.gone = False


class AggregatedJob:
    """Combines the rounds of `workers`, connected sockets by rank, until they leave or one fails.

    `run` returns None if all left between rounds, else the failure. `workers`, `rounds`, `payload_bytes` and
    `peak_bytes` (the most bytes that its chunks used) can be read at any time.
    """

    def __init__(self, workers: Mapping[int, socket.socket], limits: AggregatorLimits, timeout_s: float) -> None:
        self.workers = len(workers)
        self.limits, self.timeout_s = limits, min(timeout_s, limits.timeout_s)
        self.rounds = self.payload_bytes = self.peak_bytes = 0
        self._spare: list[_Block] = []
        self._open: deque[_Block] = deque()  # chunks that some workers have not sent yet
        self._done = 0  # chunks combined since the job began
        self._opened_s = time.monotonic()  # when the first open chunk became the first
        self._selector = selectors.DefaultSelector()
        self._buffered: set[_Worker] = set()  # their next bytes are in TLS's buffer, where no selector sees them
        now = time.monotonic()
        self._workers = [_Worker(rank, sock, self._take(), now) for rank, sock in sorted(workers.items())]

    def run(self) -> Failure | None:
        """Serve until the job ends, and close the sockets."""
        failure: Failure | None = None
        try:
            for worker in self._workers:
                worker.sock.setblocking(False)
                self._listen(worker)
            while not all(worker.gone for worker in self._workers):
                for worker, events in self._ready():
                    self._serve(worker, events)
                self._end_if_stalled()
        except Failure as found:
            failure = found
            self._tell_all(str(found))
        finally:
            for worker in self._workers:
                worker.sock.close()
            self._selector.close()
        return failure

    def stop(self) -> None:
        """End the job. Safe from any thread: its workers see their connections close."""
        for worker in self._workers:
            shut(worker.sock)

    def _ready(self) -> list[tuple[_Worker, int]]:
        """The workers that can be served, with their events. Waits until there is at least one."""
        inside = [worker for worker in self._buffered if worker.events & selectors.EVENT_READ]
        found = self._selector.select(0 if inside else self._patience_s())
        self._buffered.difference_update(inside)
        ready = dict.fromkeys(inside, selectors.EVENT_READ)
        for key, events in found:
            ready[key.data] = ready.get(key.data, 0) | events
        return list(ready.items())

    def _serve(self, worker: _Worker, events: int) -> None:
        events &= worker.events  # serving another worker may have changed which events this one waits for
        try:
            if events & selectors.EVENT_WRITE:
                self._send(worker)
            if events & selectors.EVENT_READ:
                self._receive(worker)
        except OSError as error:
            raise _broken(worker, error) from error
        except ProtocolError as error:
            raise Failure(error.kind, f"rank {worker.rank}: {error}") from error

    # receiving

    def _receive(self, worker: _Worker) -> None:
        """Receive at most one message, so that no worker is served before the others."""
        while True:
            whole = HEADER.size + (worker.block.head.length if worker.filled >= HEADER.size else 0)
            try:
                got = worker.sock.recv_into(worker.block.view[worker.filled : whole])
            except WOULD_BLOCK:
                return
            if not got:
                self._leave(worker)
                return
            worker.filled += got
            worker.heard_s = time.monotonic()
            if worker.filled == HEADER.size:
                worker.block.head = self._expected(worker, protocol.unpack(worker.block.view[: HEADER.size]))
            elif worker.filled > HEADER.size and worker.filled == whole:
                self._contribute(worker)
                if buffered(worker.sock):
                    self._buffered.add(worker)
                return

    def _expected(self, worker: _Worker, head: Head) -> Head:
        """Return `head` if it is what this worker must send next. Raises `Failure` otherwise."""
        if head.kind != protocol.DATA or head.op not in (ADD, OR):
            raise Failure("damaged", f"rank {worker.rank} sent a message of an unknown kind")
        if head.total > self.limits.round_bytes:
            text = f"rank {worker.rank} brought a round of {head.total} bytes"
            raise Failure("limit", f"{text}: allowed are {self.limits.round_bytes}")
        due = worker.due or Head(protocol.DATA, head.op, 0, worker.rounds, 0, head.total)
        due = due._replace(length=min(protocol.chunk_of(due.total, self.limits.chunk_bytes), due.total - due.start))
        if head != due or not head.length or (head.op == ADD and head.total % 4):
            raise Failure("order", f"rank {worker.rank} sent {head} where {due} was due")
        return head

    def _contribute(self, worker: _Worker) -> None:
        block, head, place = worker.block, worker.block.head, worker.given - self._done
        protocol.verify(block.view[: HEADER.size], block.payload)
        # Checked after the payload, because several workers may receive headers of the same place at once.
        if place < len(self._open) and self._open[place].head != head:
            raise Failure("mixed", f"rank {worker.rank} brought {head}, others {self._open[place].head}")
        if missing := [other.rank for other in self._workers if other.gone]:
            raise Failure("left", f"rank {missing[0]} has left")
        last = head.start + head.length == head.total
        worker.due = None if last else head._replace(start=head.start + head.length)
        worker.rounds += last
        worker.given, worker.filled = worker.given + 1, 0
        self.payload_bytes += head.length
        if place == len(self._open):
            block.present = 1
            self._open.append(block)
            worker.block = self._take()
            if place == 0:
                self._opened_s = time.monotonic()
        else:
            combine_(self._open[place].payload, block.payload, head.op)
            self._open[place].present += 1
        while self._open and self._open[0].present == len(self._workers):
            self._return()
        self._listen(worker)

    def _return(self) -> None:
        """Send the first open chunk back to all workers."""
        block = self._open.popleft()
        head = block.head
        block.view[: HEADER.size] = protocol.pack(head._replace(kind=protocol.RESULT), block.payload)
        block.left = len(self._workers)
        self.rounds += head.start + head.length == head.total
        self._done += 1
        self._opened_s = time.monotonic()
        for worker in self._workers:
            if not worker.queue:
                worker.took_s = self._opened_s
            worker.queue.append(block)
            if len(worker.queue) == 1:
                self._send(worker)
            self._listen(worker)

    def _leave(self, worker: _Worker) -> None:
        if worker.filled or self._open or worker.queue:
            raise Failure("left", f"rank {worker.rank} left in the middle of a round")
        worker.gone = True
        self._listen(worker)

    # sending

    def _send(self, worker: _Worker) -> None:
        while worker.queue:
            block = worker.queue[0]
            try:
                worker.sent += worker.sock.send(block.view[worker.sent : HEADER.size + block.head.length])
            except WOULD_BLOCK:
                break
            except OSError as error:
                raise _broken(worker, error) from error
            worker.took_s = time.monotonic()
            if worker.sent == HEADER.size + block.head.length:
                worker.queue.popleft()
                worker.sent, block.left = 0, block.left - 1
                if not block.left:
                    self._spare.append(block)
        self._listen(worker)

    def _tell_all(self, reason: str) -> None:
        """Best effort: a worker that does not receive it sees the connection close."""
        text = np.frombuffer(reason.encode()[: protocol.MAX_REASON_BYTES], np.uint8)
        message = protocol.pack(Head(protocol.FAILED, 0, text.size, 0, 0, text.size), text) + text.tobytes()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                if worker.sent:  # a message that has begun must be completed first
                    rest = worker.queue[0].view[worker.sent : HEADER.size + worker.queue[0].head.length]
                    if worker.sock.send(rest) < len(rest):
                        continue
                worker.sock.send(message)

    # attention and patience

    def _listen(self, worker: _Worker) -> None:
        ahead = worker.given - self._done + len(worker.queue)
        wanted = selectors.EVENT_READ if ahead < self.limits.window else 0
        wanted |= selectors.EVENT_WRITE if worker.queue else 0
        wanted = 0 if worker.gone else wanted
        if wanted == worker.events:
            return
        if not worker.events:
            self._selector.register(worker.sock, wanted, worker)
        elif not wanted:
            self._selector.unregister(worker.sock)
        else:
            self._selector.modify(worker.sock, wanted, worker)
        worker.events = wanted

    def _patience_s(self) -> float | None:
        """How long to wait for events before checking for stalled workers. None between rounds."""
        waiting = self._open or any(worker.filled or worker.queue for worker in self._workers)
        return min(1.0, self.timeout_s / 4) if waiting else None

    def _end_if_stalled(self) -> None:
        limit = time.monotonic() - self.timeout_s
        for worker in self._workers:
            owes = worker.filled > 0 or (bool(self._open) and worker.given == self._done)
            since = worker.heard_s if worker.filled else max(worker.heard_s, self._opened_s)
            if owes and since < limit:
                raise Failure("stalled", f"rank {worker.rank} sent nothing for {self.timeout_s:g} s")
            if worker.queue and worker.took_s < limit:
                raise Failure("stalled", f"rank {worker.rank} took nothing for {self.timeout_s:g} s")

    def _take(self) -> _Block:
        if self._spare:
            return self._spare.pop()
        size = HEADER.size + self.limits.chunk_bytes
        self.peak_bytes += size
        return _Block(size)


def _broken(worker: _Worker, error: OSError) -> Failure:
    return Failure("left", f"the connection to rank {worker.rank} broke: {explained(error)}")


def combine_(into: Bytes, other: Bytes, op: int) -> None:
    """All computation of the aggregator: int32 sums that wrap around, or the OR of bits.

    >>> into = np.array([2**31 - 1, 5], dtype=np.int32).view(np.uint8)
    >>> combine_(into, np.array([1, -6], dtype=np.int32).view(np.uint8), ADD)
    >>> into.view(np.int32).tolist()
    [-2147483648, -1]
    """
    if op == ADD:
        words = into.view(np.int32)
        words += other.view(np.int32)
    else:
        into |= other
