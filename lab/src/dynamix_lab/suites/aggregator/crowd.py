"""Hostile connections to a real aggregator, many at once and from many addresses, beside a job that must not notice.

The job adds without a pause and compares every sum. Every hostile connection must be ended by the aggregator, and what
it gives back before that must be exact.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from dynamix.compression.wire import WireLost
from dynamix_homomorphic.aggregator.client import Aggregator, AggregatorClient
from dynamix_homomorphic.aggregator.handshake import NONCE_BYTES, PLAIN, Introduction, introduce, proof, receive_part
from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.protocol import ADD, DATA, RESULT, ProtocolError, pack, parse_address
from dynamix_lab.suites.aggregator.hostile import combined, contributions, damaged, frames, odd_json
from dynamix_lab.suites.aggregator.load import WrongSum
from dynamix_lab.suites.aggregator.serving import TOKEN

THREADS, SILENT = 16, 8  # that connect at once, and connections that each of them keeps without a word
END_S = 20.0  # in which the aggregator must end a connection: beyond what it allows a handshake
WARM_UP = 0.1  # part of the connections after which memory counts as growth
JOB_ELEMENTS = 20_000
CHUNK = AggregatorLimits().chunk_bytes


def crowd(connections: int, *, seed: int) -> dict[str, Any]:
    """Counts of what came of the connections, and of the job's sums; growth of the aggregator's memory in MB."""
    began = time.monotonic()
    with _aggregator() as (address, process, statistics):
        job = _SoundJob(address)
        attackers = [_Attacker(address, connections, seed, number) for number in range(THREADS)]
        watch = _Memory(process, lambda: sum(one.done for one in attackers) / connections)
        for thread in (job, watch, *attackers):
            thread.start()
        for attacker in attackers:
            attacker.join()
        watch.join()
        job.stop()
        counted = statistics()
    outcomes: Counter[str] = sum((one.outcomes for one in attackers), Counter())
    errors = [text for one in attackers for text in one.errors] + job.errors
    defects = counted["failed"].get("defect", 0) + counted["refused"].get("defect", 0)
    return {
        "inputs": sum(one.done for one in attackers),
        "taken": outcomes["taken"],
        "refused": outcomes["refused"],
        "wrong": outcomes["wrong"] + job.wrong,
        "hung": outcomes["hung"] + (job.rounds == 0),
        "other": outcomes["other"] + defects + len(job.errors),
        "job_rounds": job.rounds,
        "grown_mb": round(watch.grown_mb, 1),
        "seconds": round(time.monotonic() - began, 1),
        "escapes": dict.fromkeys(errors[:20], 1),
    }


@contextlib.contextmanager
def _aggregator() -> Iterator[tuple[str, psutil.Process, Any]]:
    """Address, process, and a call that ends it and gives its statistics."""
    command = [sys.executable, "-m", "dynamix_lab.suites.aggregator.serving", "aggregator", "-1"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def statistics() -> dict[str, Any]:
        said, _ = process.communicate(timeout=60)
        return dict(json.loads(said))

    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid), statistics
    finally:
        process.kill()
        process.wait()


class _SoundJob(threading.Thread):
    """Two workers that add numbers until `stop`; `rounds`, and how many sums were `wrong`."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.rounds = self.wrong = 0
        self.errors: list[str] = []
        self._ended = threading.Event()
        where, session = Aggregator(address, TOKEN, job="sound", timeout_s=60), secrets.token_hex(8)
        self._clients = [AggregatorClient.connect(where, session=session, workers=2, rank=rank) for rank in range(2)]

    def run(self) -> None:
        second = threading.Thread(target=self._work, args=(1,), daemon=True)
        second.start()
        self._work(0)
        second.join(60)

    def stop(self) -> None:
        self._ended.set()
        self.join(120)

    def _work(self, rank: int) -> None:
        # Both workers see the same last round: it is the one whose sum says so.
        numbers = np.arange(JOB_ELEMENTS, dtype=np.int32)
        try:
            while True:
                factor = self.rounds % 7 + 1 if rank == 0 else 1
                values = numbers * factor
                values[:2] = (factor, self._ended.is_set()) if rank == 0 else (0, 0)
                self._clients[rank].reduce_((ADD, values.view(np.uint8)))
                last, factor = bool(values[1]), int(values[0])
                if not np.array_equal(values[2:], numbers[2:] * (factor + 1)):
                    self.wrong += 1
                if last:
                    return
                self.rounds += rank == 0
        except WireLost as error:
            self.errors.append(f"the sound job: {error}")


class _Memory(threading.Thread):
    """Most of the aggregator's memory beyond what it took when the first connections had come and gone."""

    def __init__(self, process: psutil.Process, done: Any) -> None:
        super().__init__(daemon=True)
        self.grown_mb = 0.0
        self._process, self._done = process, done

    def run(self) -> None:
        base: int | None = None
        while (part := self._done()) < 1:
            with contextlib.suppress(psutil.Error):
                now = self._process.memory_info().rss
                if base is None and part >= WARM_UP:
                    base = now
                self.grown_mb = max(self.grown_mb, 0.0 if base is None else (now - base) / 2**20)
            time.sleep(0.05)


class _Attacker(threading.Thread):
    """One of the threads that connect, each from addresses of its own."""

    def __init__(self, address: str, connections: int, seed: int, number: int) -> None:
        super().__init__(daemon=True)
        self.count, self.done, self.errors = len(range(number, connections, THREADS)), 0, list[str]()
        self.outcomes = Counter[str]()
        self._where, self._number = parse_address(address), number
        self._rng = random.Random(f"crowd {seed} {number}")
        self._silent: list[socket.socket] = []

    def run(self) -> None:
        for _ in range(self.count):
            try:
                outcome = self._attempt()
            except WrongSum as error:
                outcome = "wrong"
                self.errors.append(str(error))
            except TimeoutError as error:
                outcome = "hung"
                self.errors.append(f"not ended: {error}")
            except (ProtocolError, ConnectionError):
                outcome = "refused"
            except Exception as error:
                outcome = "other"
                self.errors.append(repr(error)[:200])
            self.outcomes[outcome] += 1
            self.done += 1
        for sock in self._silent:
            sock.close()

    def _attempt(self) -> str:
        how = self._rng.random()
        if how < 0.5:
            return self._odd_handshake()
        if how < 0.6:
            self._silent.append(self._connect())
            if len(self._silent) > SILENT:
                self._silent.pop(0).close()
            return "refused"
        return self._odd_messages(workers=self._rng.choice((1, 2)))

    def _connect(self) -> socket.socket:
        source = f"127.{self._number + 1}.{self._rng.randrange(256)}.{self._rng.randrange(1, 255)}"
        return socket.create_connection(self._where, timeout=END_S, source_address=(source, 0))

    def _odd_handshake(self) -> str:
        rng = self._rng
        with self._connect() as sock:
            if rng.random() < 0.3:
                sock.sendall(rng.randbytes(rng.randrange(1, 200)))
            else:
                sock.sendall(PLAIN)
                nonce = receive_part(sock, time.monotonic() + END_S)[-NONCE_BYTES:]
                who = {"job": "x", "session": secrets.token_hex(4), "workers": 4, "rank": 0, "timeout_s": 5.0}
                said = odd_json({**who, "nonce": rng.randbytes(NONCE_BYTES).hex()}, rng)
                part = proof(TOKEN if rng.random() < 0.8 else "another", b"worker", nonce, said) + said
                sock.sendall(len(part).to_bytes(4, "little") + part)
            _say(sock, b"")
            _until_closed(sock)
        return "refused"

    def _odd_messages(self, workers: int) -> str:
        """A job of its own whose last worker sends a damaged stream."""
        rng, session = self._rng, secrets.token_hex(8)
        sizes = rng.choices((4, 400, 40_000, 300_000), weights=(3, 3, 2, 1), k=rng.choice((1, 2)))
        brought = [[np.frombuffer(rng.randbytes(size), np.uint8) for size in sizes] for _ in range(workers)]
        sent = [frames(ADD, values, CHUNK) for values in brought]
        due = [head for head, _ in sent[0]]
        streams = [b"".join(pack(h, p) + p.tobytes() for h, p in one) for one in sent]
        streams[-1] = damaged(sent[-1], rng, DATA)
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(self._connect()) for _ in range(workers)]
            for rank, sock in enumerate(sockets):
                sock.sendall(PLAIN)
                who = Introduction("hostile", session, workers, rank, 5.0)
                introduce(sock, who, TOKEN, rng.randbytes(NONCE_BYTES), time.monotonic() + END_S)
            for sock, stream in zip(sockets, streams, strict=True):
                sock.settimeout(END_S)
                _say(sock, stream)
            parts = [contributions(stream, due) for stream in streams]
            exact = [combined(ADD, found) for found in zip(*parts, strict=False)]
            whole = True
            for sock in sockets:
                results = contributions(_until_closed(sock), [head._replace(kind=RESULT) for head in due])
                whole = whole and len(results) == len(due)
                if len(results) > len(exact) or not all(map(np.array_equal, results, exact)):
                    raise WrongSum(f"a hostile job got {len(results)} results of {len(exact)} whole contributions")
        return "taken" if whole else "refused"


def _say(sock: socket.socket, words: bytes) -> None:
    """The last words, unless the other side has ended already. Raises TimeoutError."""
    try:
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)
    except TimeoutError:
        raise
    except OSError:
        pass


def _until_closed(sock: socket.socket) -> bytes:
    """All that comes. Raises TimeoutError where the other side does not close."""
    found, deadline = bytearray(), time.monotonic() + END_S
    while True:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            part = sock.recv(1 << 16)
        except ConnectionError:
            return bytes(found)
        if not part:
            return bytes(found)
        found += part
