"""Damaged frames of an aggregator, in one process: handshakes, a worker's messages, an aggregator's messages.

Each must lead to an error of ours, or to exactly the sum of the parts that arrived whole and in order. `contributions`
reads these parts from the bytes; it shares only the form of a header with the aggregator.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from dynamix.compression.wire import WireLost
from dynamix_homomorphic.aggregator.client import AggregatorClient
from dynamix_homomorphic.aggregator.handshake import (
    GREETING,
    NONCE_BYTES,
    PLAIN,
    PROOF_BYTES,
    Introduction,
    hear,
    introduce,
    proof,
    require_plain,
)
from dynamix_homomorphic.aggregator.job import AggregatedJob, AggregatorLimits
from dynamix_homomorphic.aggregator.protocol import (
    ADD,
    DATA,
    FAILED,
    HEADER,
    OR,
    RESULT,
    Bytes,
    Head,
    ProtocolError,
    chunk_of,
    chunks,
    pack,
)
from dynamix_lab.suites.fuzz import mutations

LIMITS = AggregatorLimits(chunk_bytes=1024, window=4, round_bytes=1 << 16, timeout_s=2.0)
HANG_S = 5.0
TOKEN = "a token of enough length"
SIZES = (4, 100, 1024, 1500, 4096)  # bytes of a round
_HUGE = (0, 1, 2, 3, 5, 255, 2**15, 2**16, 2**16 + 4, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**64 - 1)


class WrongSum(Exception):
    """The returned sum differs from that of the sent parts."""


class Hung(Exception):
    """It did not end by itself."""


@contextmanager
def limited(seconds: float = HANG_S) -> Iterator[None]:
    """Raise `Hung` after so many seconds. Works in the main thread only."""

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise Hung(f"{seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# handshakes


class Spoken:
    """A socket on which the other side has sent `heard` and left."""

    def __init__(self, heard: bytes) -> None:
        self._heard, self._at = heard, 0

    def settimeout(self, seconds: float) -> None:
        """Do nothing: it never waits."""

    def recv(self, most: int) -> bytes:
        part = self._heard[self._at : self._at + most]
        self._at += len(part)
        return part

    def sendall(self, said: bytes) -> None:
        """Do nothing: the other side has left."""


def _part(said: bytes) -> bytes:
    return struct.pack("<I", len(said)) + said


def odd_json(fields: dict[str, Any], rng: random.Random) -> bytes:
    """JSON of `fields` with one damage, to a value, to the text or to its bytes."""
    how = rng.random()
    if how < 0.5:
        fields = mutations.value(fields, rng)
    try:
        text = json.dumps(fields, default=str)
    except (ValueError, RecursionError):
        text = "[" * rng.choice((10, 900, 4000))
    if how > 0.4:
        text = mutations.text(text, rng)
    said = text.encode(errors="surrogatepass")
    return mutations.raw(said, rng) if how > 0.8 else said


class Handshakes:
    """Handshakes on both sides: a worker's to an aggregator, and an aggregator's to a worker."""

    name = "handshakes"

    def attempt(self, rng: random.Random) -> bool:
        """Whether it was accepted. Raises unexpected errors."""
        with limited():
            return self._worker(rng) if rng.random() < 0.7 else self._aggregator(rng)

    def _worker(self, rng: random.Random) -> bool:
        nonce = rng.randbytes(NONCE_BYTES)
        who = {"job": "x", "session": "s", "workers": 4, "rank": rng.randrange(4), "timeout_s": 5.0}
        said = odd_json({**who, "nonce": rng.randbytes(NONCE_BYTES).hex()}, rng)
        token = TOKEN if rng.random() < 0.9 else "another"
        words = PLAIN + _part(proof(token, b"worker", nonce, said) + said)
        sock: Any = Spoken(_torn(words, rng))
        try:
            require_plain(sock, time.monotonic() + 1)
            found, theirs = hear(sock, TOKEN, nonce, time.monotonic() + 1)
        except (ProtocolError, OSError):
            return False
        whole = 0 <= found.rank < found.workers and 0 < found.timeout_s < float("inf") and len(theirs) == NONCE_BYTES
        if not whole or token != TOKEN:
            raise WrongSum(f"{found} was let in")
        return True

    def _aggregator(self, rng: random.Random) -> bool:
        nonce = rng.randbytes(NONCE_BYTES)
        fields: dict[str, Any] = {"chunk_bytes": 1024, "timeout_s": 5.0}
        said = odd_json(fields if rng.random() < 0.8 else {"refused": "too many"}, rng)
        token = TOKEN if rng.random() < 0.9 else "another"
        words = _part(GREETING + rng.randbytes(NONCE_BYTES)) + _part(proof(token, b"aggregator", nonce, said) + said)
        sock: Any = Spoken(_torn(words, rng))
        try:
            terms = introduce(sock, Introduction("x", "s", 4, 0, 5.0), TOKEN, nonce, time.monotonic() + 1)
        except (ProtocolError, OSError):
            return False
        if terms["chunk_bytes"] % 4 or terms["chunk_bytes"] < 4 or not 0 < terms["timeout_s"] < float("inf"):
            raise WrongSum(f"{terms} were taken")
        return True


def _torn(words: bytes, rng: random.Random) -> bytes:
    """The messages, unchanged or cut off, changed, or with an invalid length in front."""
    how = rng.random()
    if how < 0.7:
        return words
    if how < 0.8:
        return words[: rng.randrange(len(words))]
    if how < 0.95:
        return mutations.raw(words, rng)
    return words[: len(PLAIN)] + struct.pack("<I", rng.choice((0, 1, PROOF_BYTES - 1, 4097, 1 << 31, (1 << 32) - 1)))


# messages


def frames(op: int, rounds: Sequence[Bytes], chunk_bytes: int) -> list[tuple[Head, Bytes]]:
    """A worker's messages, in order."""
    return [
        (head, values[head.start : head.start + head.length])
        for number, values in enumerate(rounds)
        for head in chunks(op, number, values.size, chunk_bytes)
    ]


def damaged(sent: list[tuple[Head, Bytes]], rng: random.Random, kind: int) -> bytes:
    """The bytes of a stream of messages, one of them damaged."""
    at, how = rng.randrange(len(sent)), rng.random()
    whole = [pack(head, payload) + payload.tobytes() for head, payload in sent]
    head, payload = sent[at]
    if how < 0.25:  # bits or bytes, also after the message's end
        whole[at] = mutations.raw(whole[at], rng)
    elif how < 0.5:  # a field, with a valid checksum
        field = rng.choice(Head._fields)
        most = {"kind": 1 << 8, "op": 1 << 8, "length": 1 << 32}.get(field, 1 << 64)
        near = getattr(head, field) + rng.choice((-1, 1, 4, 1024))
        made = head._replace(**{field: rng.choice((*_HUGE, near)) % most})
        whole[at] = pack(made, payload) + payload.tobytes()
    elif how < 0.6:  # another payload, with a valid checksum
        other = np.frombuffer(rng.randbytes(rng.choice((payload.size, payload.size, 4, 0, 2000))), np.uint8)
        whole[at] = pack(head, other) + other.tobytes()
    elif how < 0.7:  # cut off
        whole[at:] = [whole[at][: rng.randrange(len(whole[at]))]]
    elif how < 0.85:  # another order
        other_at = rng.randrange(len(whole))
        if rng.random() < 0.5:
            whole[at], whole[other_at] = whole[other_at], whole[at]
        else:
            whole.insert(other_at, whole[at])
    elif how < 0.95:  # a message of another kind
        made = head._replace(kind=rng.choice([k for k in (0, DATA, RESULT, FAILED, 9) if k != kind]))
        whole.insert(at, pack(made, payload) + payload.tobytes())
    else:
        whole[at] = rng.randbytes(rng.randrange(3 * HEADER.size))
    return b"".join(whole)


def contributions(stream: bytes, due: Sequence[Head]) -> list[Bytes]:
    """The payloads at the beginning of `stream` that are whole, undamaged and expected, in order."""
    found, at = [], 0
    for head in due:
        payload = np.frombuffer(stream[at + HEADER.size : at + HEADER.size + head.length], np.uint8)
        if payload.size != head.length or stream[at : at + HEADER.size] != pack(head, payload):
            break
        found.append(payload)
        at += HEADER.size + head.length
    return found


def combined(op: int, parts: Sequence[Bytes]) -> Bytes:
    """The sum of all workers' parts, in exact integers."""
    if op == OR:
        union: Bytes = np.bitwise_or.reduce(np.stack(parts))
        return union
    exact = np.stack([part.view(np.int32) for part in parts]).astype(np.int64).sum(0)
    wrapped: Bytes = exact.astype(np.int32).view(np.uint8)
    return wrapped


def _rounds(rng: random.Random) -> list[Bytes]:
    count = rng.choice((1, 1, 2, 3))
    return [np.frombuffer(rng.randbytes(size), np.uint8) for size in rng.choices(SIZES, k=count)]


def _all_of(sock: socket.socket) -> bytes:
    """All received bytes; the other side has closed."""
    found = bytearray()
    sock.setblocking(False)
    while True:
        try:
            part = sock.recv(1 << 16)
        except OSError:
            return bytes(found)
        if not part:
            return bytes(found)
        found += part


class WorkersMessages:
    """One worker of a job sends a damaged stream, the others sound ones. The returned sums must be exact."""

    name = "worker-messages"

    def attempt(self, rng: random.Random) -> bool:
        """Whether the job ended without a failure. Raises unexpected errors, and `WrongSum`."""
        op, workers = rng.choice((ADD, OR)), rng.choice((2, 2, 3))
        shapes = _rounds(rng)
        brought = [[np.frombuffer(rng.randbytes(v.size), np.uint8) for v in shapes] for _ in range(workers)]
        sent = [frames(op, values, LIMITS.chunk_bytes) for values in brought]
        bad, due = rng.randrange(workers), [head for head, _ in sent[0]]
        streams = [b"".join(pack(h, p) + p.tobytes() for h, p in one) for one in sent]
        streams[bad] = damaged(sent[bad], rng, DATA)
        pairs = [socket.socketpair() for _ in range(workers)]
        try:
            for (ours, _), stream in zip(pairs, streams, strict=True):
                ours.setblocking(False)
                ours.send(stream)
                ours.shutdown(socket.SHUT_WR)
            job = AggregatedJob({rank: theirs for rank, (_, theirs) in enumerate(pairs)}, LIMITS, LIMITS.timeout_s)
            with limited():
                failure = job.run()
            if job.peak_bytes > LIMITS.job_bytes(workers):
                raise WrongSum(f"{job.peak_bytes} bytes are more than the job may hold")
            parts = [contributions(stream, due) for stream in streams]
            for ours, _ in pairs:
                self._compare(_all_of(ours), op, due, parts)
        finally:
            for pair in pairs:
                for sock in pair:
                    sock.close()
        return failure is None

    def _compare(self, got: bytes, op: int, due: Sequence[Head], parts: list[list[Bytes]]) -> None:
        results = contributions(got, [head._replace(kind=RESULT) for head in due])
        most = min(len(one) for one in parts)
        if len(results) > most:
            raise WrongSum(f"{len(results)} results came of {most} whole contributions")
        for at, result in enumerate(results):
            if not np.array_equal(result, combined(op, [one[at] for one in parts])):
                raise WrongSum(f"result {at} of {due[at]}")


class AggregatorsMessages:
    """One worker of a sound job gets a damaged stream. It must take what is whole and expected, or give up."""

    name = "aggregator-messages"

    def attempt(self, rng: random.Random) -> bool:
        """Whether all was accepted. Raises unexpected errors, and `WrongSum`."""
        op, values = rng.choice((ADD, OR)), _rounds(rng)
        heads = [head for head, _ in frames(op, values, LIMITS.chunk_bytes)]
        answers = [(h._replace(kind=RESULT), np.frombuffer(rng.randbytes(h.length), np.uint8)) for h in heads]
        stream = damaged(answers, rng, RESULT)
        ours, theirs = socket.socketpair()
        try:
            theirs.setblocking(False)
            theirs.send(stream)
            theirs.shutdown(socket.SHUT_WR)
            client = AggregatorClient(ours, chunk_bytes=LIMITS.chunk_bytes, timeout_s=LIMITS.timeout_s)
            sums = [value.copy() for value in values]
            try:
                with limited():
                    client.reduce_(*((op, one) for one in sums))
            except WireLost:
                return False
            due = contributions(stream, [head for head, _ in answers])
            if len(due) < len(heads) or not np.array_equal(np.concatenate(due), np.concatenate(sums)):
                raise WrongSum(f"{len(due)} of {len(heads)} results were whole")
            return True
        finally:
            ours.close()
            theirs.close()


assert all(chunk_of(size, LIMITS.chunk_bytes) == LIMITS.chunk_bytes for size in SIZES)
