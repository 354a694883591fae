"""A process in the network that adds and ORs gradients for many jobs: `dynamix aggregator`.

    dynamix aggregator --host 10.0.0.7 --port 5123 --token-file token          # where the network's lines meet
    CompressionState("lhc-one-phase", aggregator=Aggregator("10.0.0.7:5123", token=...))      # in every rank

It stands in for a switch or a server that computes in the network (SwitchML, ATP; arXiv 2402.07529 section 4): all it
can do is `combine_`. A thread accepts and introduces workers, one more thread per job moves its chunks; jobs share
nothing but the table of who may join.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import secrets
import signal
import socket
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from dynamix.compression.aggregator.job import AggregatedJob, Failure, Limits
from dynamix.compression.aggregator.protocol import NONCE_BYTES, Introduction, ProtocolError, answer, greet, hear
from dynamix.errors import ConfigError

_log = logging.getLogger(__name__)
HANDSHAKE_S = 10.0
_GREETINGS = 512  # handshakes at once; one more ends the oldest, which a worker's own has left long before
_SWEEP_S = 0.5
_REMEMBERED = 4096  # ended sessions, which nobody can join again
MIN_TOKEN = 16


class _Gathering:
    """A job some of whose workers are still missing."""

    def __init__(self, who: Introduction) -> None:
        self.workers, self.timeout_s = who.workers, who.timeout_s
        self.sockets: dict[int, socket.socket] = {}
        self.since_s = time.monotonic()

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()


class AggregatorServer:
    """Listens from construction on, serves after `start()`, until `close()`. A context manager.

    host, port   where to listen; port 0 takes a free one, see `address`
    token        what workers must hold, at least 16 characters; needed unless `host` is this machine's loopback
    limits       see `Limits`

    Raises `ConfigError` for a host that others can reach without a token, and where it cannot listen.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, token: str = "", limits: Limits | None = None
    ) -> None:
        if not token and not is_loopback(host):
            raise ConfigError("host", host, "127.0.0.1 or ::1 without a token", "give a token file")
        if token and len(token) < MIN_TOKEN:
            raise ConfigError("token", f"{len(token)} characters", f"{MIN_TOKEN} or more", "make a longer one")
        self.limits, self._token = limits or Limits(), token
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=256)
        except (OSError, OverflowError) as error:
            allowed = "an address of this machine that is free"
            raise ConfigError("host, port", f"{host}:{port}", allowed, str(error)) from error
        self._listener.settimeout(_SWEEP_S)
        self._lock = threading.Lock()
        self._gathering: dict[tuple[str, str], _Gathering] = {}
        self._running: dict[tuple[str, str], AggregatedJob] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)
        self._counts, self._failed, self._refused = Counter[str](), Counter[str](), Counter[str]()
        self._greeting: dict[socket.socket, None] = {}  # the oldest first
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """host:port, as workers need it."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Serve on a thread of its own."""
        self._thread = threading.Thread(target=self.serve, name="dynamix-aggregator", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Accept workers until `close()`."""
        while not self._stopping:
            self._sweep()
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or out of descriptors: then waiting may help
                time.sleep(0 if self._stopping else 0.05)
                continue
            self._make_room()
            self._greeting[sock] = None
            try:
                threading.Thread(target=self._introduce, args=(sock,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._greeting.pop(sock, None)
                sock.close()

    def close(self) -> None:
        """End all jobs and stop listening."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        if self._thread is not None:
            self._thread.join()
        self._listener.close()
        with self._lock:
            jobs, gathering = list(self._running.values()), list(self._gathering.values())
            self._gathering.clear()
        for job in jobs:
            job.stop()
        for waiting in gathering:
            waiting.close()

    def statistics(self) -> dict[str, Any]:
        """Jobs now and so far, failures and refusals by kind, rounds and bytes received, the largest job's bytes."""
        with self._lock:
            jobs = list(self._running.values())
            return {
                "jobs": {"running": len(jobs), "gathering": len(self._gathering), "done": self._counts["done"]},
                "failed": dict(self._failed),
                "refused": dict(self._refused),
                "rounds": self._counts["rounds"] + sum(job.rounds for job in jobs),
                "payload_bytes": self._counts["payload_bytes"] + sum(job.payload_bytes for job in jobs),
                "peak_bytes": max([self._counts["peak_bytes"], *(job.peak_bytes for job in jobs)]),
            }

    def __enter__(self) -> AggregatorServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # introductions

    def _introduce(self, sock: socket.socket) -> None:
        """One handshake, on a thread of its own: a slow worker keeps nobody waiting."""
        deadline = time.monotonic() + HANDSHAKE_S
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            greet(sock, nonce, deadline)
            who, theirs = hear(sock, self._token, nonce, deadline)
            self._greeting.pop(sock, None)  # it has said who it is: nobody takes its place any more
            if (why := self._admit(who, sock, theirs, deadline)) is not None:
                self._refuse(sock, why, theirs, deadline)
        except ProtocolError as error:
            self._refuse(sock, error, nonce, deadline)
        except OSError:
            with self._lock:
                self._refused["introduction"] += 1
            sock.close()
        finally:
            self._greeting.pop(sock, None)

    def _make_room(self) -> None:
        """Connections that say nothing keep nobody out: the oldest handshake ends where there are too many."""
        while len(self._greeting) >= _GREETINGS:
            oldest = next(iter(list(self._greeting)), None)
            if oldest is not None and self._greeting.pop(oldest, 0) is None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end, counts and closes

    def _refuse(self, sock: socket.socket, why: ProtocolError, nonce: bytes, deadline_s: float) -> None:
        with self._lock:
            self._refused[why.kind] += 1
        _log.warning("refused a worker: %s", why)
        with contextlib.suppress(OSError, ProtocolError):
            answer(sock, {"refused": str(why)}, "", nonce, deadline_s)
        sock.close()

    def _admit(self, who: Introduction, sock: socket.socket, nonce: bytes, deadline_s: float) -> ProtocolError | None:
        """Let a worker in, or say why not. The last of a job starts it."""
        key = (who.job, who.session)
        with self._lock:
            if (why := self._reason_against(who, key)) is not None:
                return why
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            terms = {"chunk_bytes": self.limits.chunk_bytes, "timeout_s": min(who.timeout_s, self.limits.timeout_s)}
            answer(sock, terms, self._token, nonce, deadline_s)  # short, so it never waits
            sock.setblocking(False)
            gathering = self._gathering.setdefault(key, _Gathering(who))
            gathering.sockets[who.rank] = sock
            if len(gathering.sockets) == gathering.workers:
                del self._gathering[key]
                self._running[key] = AggregatedJob(gathering.sockets, self.limits, gathering.timeout_s)
                threading.Thread(target=self._run, args=(key,), name=f"dynamix-job-{who.job}", daemon=True).start()
        return None

    def _reason_against(self, who: Introduction, key: tuple[str, str]) -> ProtocolError | None:
        limits, gathering = self.limits, self._gathering.get(key)
        if key in self._ended:
            return ProtocolError("ended", f"job {who.job} of this session has ended")
        if key in self._running:
            return ProtocolError("rank", f"job {who.job} of this session is complete")
        if gathering is not None:
            if gathering.workers != who.workers:
                text = f"rank {who.rank} says {who.workers} workers, others of job {who.job} {gathering.workers}"
                return ProtocolError("workers", text)
            if who.rank in gathering.sockets:
                return ProtocolError("rank", f"rank {who.rank} of job {who.job} is here already")
            return None
        if who.workers > limits.workers:
            return ProtocolError("limit", f"{who.workers} workers are too many: allowed are {limits.workers} a job")
        if len(self._running) + len(self._gathering) >= limits.jobs:
            return ProtocolError("limit", f"no more than {limits.jobs} jobs at once: start it with a higher --jobs")
        sizes = [job.workers for job in self._running.values()] + [job.workers for job in self._gathering.values()]
        taken = sum(limits.job_bytes(workers) for workers in sizes)
        if (needed := limits.job_bytes(who.workers)) > (left := limits.memory_bytes - taken):
            text = f"{who.workers} workers need {needed} bytes, {left} are left"
            return ProtocolError("limit", f"{text}: start it with a higher --memory-mb")
        return None

    # jobs

    def _run(self, key: tuple[str, str]) -> None:
        job = self._running[key]
        _log.info("job %s: %d workers", key[0], job.workers)
        try:
            failure = job.run()
        except Exception as error:
            _log.exception("job %s", key[0])
            failure = Failure("defect", repr(error))
        with self._lock:
            del self._running[key]
            self._ended.append(key)
            self._counts["rounds"] += job.rounds
            self._counts["payload_bytes"] += job.payload_bytes
            self._counts["peak_bytes"] = max(self._counts["peak_bytes"], job.peak_bytes)
            if failure is None:
                self._counts["done"] += 1
                _log.info("job %s: done after %d rounds", key[0], job.rounds)
            else:
                self._failed[failure.kind] += 1
                _log.warning("job %s: ended after %d rounds: %s", key[0], job.rounds, failure)

    def _sweep(self) -> None:
        """Drop jobs whose workers do not all come, or leave before all have."""
        now = time.monotonic()
        with self._lock:
            for key, gathering in list(self._gathering.items()):
                late = now - gathering.since_s > min(gathering.timeout_s, self.limits.timeout_s)
                if late or any(_is_closed(sock) for sock in gathering.sockets.values()):
                    del self._gathering[key]
                    self._ended.append(key)
                    self._failed["stalled" if late else "left"] += 1
                    _log.warning("job %s: not all of its %d workers came", key[0], gathering.workers)
                    gathering.close()


def _is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("10.1.2.3")
    (True, True, False, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def serve(host: str, port: int, *, token_file: Path | None, limits: Limits, as_json: bool = False) -> None:
    """The command: print the address, serve until interrupted (^C or SIGTERM), print what happened."""
    token = ""
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("token_file", str(token_file), "a readable text file", str(error)) from error
        if not token:
            raise ConfigError("token_file", str(token_file), f"{MIN_TOKEN} characters or more", "it is empty")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    server = AggregatorServer(host, port, token=token, limits=limits)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops a service ends it as ^C does
    try:
        with contextlib.suppress(KeyboardInterrupt):
            print(json.dumps({"address": server.address}) if as_json else f"listening on {server.address}", flush=True)
            server.serve()
    finally:
        server.close()
        print(json.dumps(server.statistics()), flush=True)
