"""A process in the network that sums and ORs gradients for many jobs: `dynamix aggregator`.

    dynamix aggregator --host 10.0.0.7 --port 5123 --token-file token --tls-cert ... --tls-key ... --tls-ca ...
    CompressionState("lhc-one-phase", aggregator=Aggregator("10.0.0.7:5123", token=..., tls_cert=..., ...))

It replaces a switch or a server that computes in the network (SwitchML, ATP; arXiv 2402.07529 section 4): all its
computation is `combine_`. One thread accepts workers, each handshake has a thread, and each job has one that moves its
chunks. Jobs share nothing but the table of who may join.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
from collections import Counter, deque
from typing import Any

from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.admission import Greeting, Greetings, beyond, origin
from dynamix_homomorphic.aggregator.handshake import (
    NONCE_BYTES,
    ONLY_TLS,
    Introduction,
    answer,
    greet,
    hear,
    require_plain,
    seconds_left,
    send_part,
)
from dynamix_homomorphic.aggregator.job import AggregatedJob, AggregatorLimits, Failure
from dynamix_homomorphic.aggregator.protocol import ProtocolError, is_loopback
from dynamix_homomorphic.aggregator.tls import FIRST_BYTE, TlsFiles, explained, is_closed

_log = logging.getLogger(__name__)
HANDSHAKE_S = 10.0
GATHER_S = 10.0  # after that an incomplete job makes room for others
SWEEP_S = 0.5  # between two checks of incomplete jobs
_REMEMBERED = 4096  # ended sessions, which no worker can join again
MIN_TOKEN = 16


class _Gathering:
    """A job that still waits for some of its workers."""

    def __init__(self, who: Introduction) -> None:
        self.workers, self.timeout_s = who.workers, who.timeout_s
        self.sockets: dict[int, socket.socket] = {}
        self.since_s = time.monotonic()

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()


class AggregatorServer:
    """Listens from construction on, and serves from `start()` until `close()`. A context manager.

    host, port   where to listen; port 0 takes a free one, see `address`
    token        the token that workers must hold, at least 16 characters
    tls          certificate, key and authority; workers must show a certificate of that authority
    limits       see `AggregatorLimits`

    Both `token` and `tls` are required unless `host` is this machine's loopback. Raises `ConfigError` if one of them is
    missing, if a file cannot be read, and if it cannot listen.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str = "",
        tls: TlsFiles | None = None,
        limits: AggregatorLimits | None = None,
    ) -> None:
        if not (token and tls) and not is_loopback(host):
            fix = "give --token-file, --tls-cert, --tls-key and --tls-ca"
            raise ConfigError("host", host, "127.0.0.1 or ::1 without a token and TLS", fix)
        if token and len(token) < MIN_TOKEN:
            raise ConfigError("token", f"{len(token)} characters", f"{MIN_TOKEN} or more", "make a longer one")
        self.limits, self._token = limits or AggregatorLimits(), token
        self._tls = tls.server() if tls else None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=256)
        except (OSError, OverflowError) as error:
            allowed = "an address of this machine that is free"
            raise ConfigError("host, port", f"{host}:{port}", allowed, str(error)) from error
        self._listener.settimeout(SWEEP_S)
        self._lock = threading.Lock()
        self._gathering: dict[tuple[str, str], _Gathering] = {}
        self._running: dict[tuple[str, str], AggregatedJob] = {}
        self._addresses: dict[tuple[str, str], list[str]] = {}  # of every job's connected workers, in order of arrival
        self._ended: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)
        self._counts, self._failed, self._refused = Counter[str](), Counter[str](), Counter[str]()
        self._greetings = Greetings(self.limits.handshakes, self.limits.handshakes_per_address)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.beat_s = time.monotonic()  # when it last looked for workers, every `SWEEP_S`

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
            self.beat_s = time.monotonic()
            try:
                sock, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or out of descriptors, in which case waiting may help
                time.sleep(0 if self._stopping else 0.05)
                continue
            greeting = self._greetings.begin(sock, origin(str(peer[0])))
            try:
                threading.Thread(target=self._introduce, args=(greeting,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._greetings.done(greeting)
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
        """Jobs now and so far, failures and refusals by kind, rounds and bytes received, bytes held now, the largest
        job's bytes, workers of running jobs, and unfinished handshakes.
        """
        with self._lock:
            jobs = list(self._running.values())
            return {
                "jobs": {"running": len(jobs), "gathering": len(self._gathering), "done": self._counts["done"]},
                "failed": dict(self._failed),
                "refused": dict(self._refused),
                "rounds": self._counts["rounds"] + sum(job.rounds for job in jobs),
                "payload_bytes": self._counts["payload_bytes"] + sum(job.payload_bytes for job in jobs),
                "held_bytes": sum(job.peak_bytes for job in jobs),
                "peak_bytes": max([self._counts["peak_bytes"], *(job.peak_bytes for job in jobs)]),
                "workers": sum(job.workers for job in jobs),
                "handshakes": len(self._greetings),
            }

    def __enter__(self) -> AggregatorServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # introductions

    def _introduce(self, greeting: Greeting) -> None:
        """Run one handshake on its own thread, so that a slow worker delays no other."""
        deadline = time.monotonic() + HANDSHAKE_S
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            if self._tls is not None:
                self._secure(greeting, deadline)
            greet(greeting.sock, nonce, deadline)
            if self._tls is None:
                require_plain(greeting.sock, deadline)
            who, theirs = hear(greeting.sock, self._token, nonce, deadline)
            self._greetings.done(greeting)
            if (why := self._admit(who, greeting, theirs, deadline)) is not None:
                self._refuse(greeting.sock, why, theirs, deadline)
        except ProtocolError as error:
            self._refuse(greeting.sock, error, nonce, deadline)
        except OSError as error:
            self._drop(greeting.sock, "tls" if isinstance(error, ssl.SSLError) else "introduction", explained(error))
        except Exception as error:  # a bug of ours affects only this connection
            _log.exception("a handshake")
            self._drop(greeting.sock, "defect", repr(error))
        finally:
            self._greetings.done(greeting)

    def _secure(self, greeting: Greeting, deadline_s: float) -> None:
        """Put TLS on the connection. Raises OSError, and `ProtocolError` for workers that do not use TLS."""
        assert self._tls is not None
        sock = greeting.sock
        sock.settimeout(seconds_left(deadline_s))
        first = sock.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionError("the connection was closed before it said anything")
        if first[0] != FIRST_BYTE:
            send_part(sock, ONLY_TLS, deadline_s)
            require_plain(sock, deadline_s)
            raise ProtocolError("tls", "the worker does not speak TLS")
        greeting.sock = secured = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        secured.settimeout(seconds_left(deadline_s))
        secured.do_handshake()

    def _refuse(self, sock: socket.socket, why: ProtocolError, nonce: bytes, deadline_s: float) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            answer(sock, {"refused": str(why)}, "", nonce, deadline_s)
        self._drop(sock, why.kind, str(why))

    def _drop(self, sock: socket.socket, kind: str, why: str) -> None:
        with self._lock:
            self._refused[kind] += 1
        _log.warning("refused a worker: %s", why)
        sock.close()

    def _admit(self, who: Introduction, greeting: Greeting, nonce: bytes, deadline_s: float) -> ProtocolError | None:
        """Admit a worker, or return why not. The last worker of a job starts it."""
        key, sock = (who.job, who.session), greeting.sock
        with self._lock:
            if (why := self._reason_against(who, key) or self._no_room(who, key, greeting.address)) is not None:
                return why
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            terms = {"chunk_bytes": self.limits.chunk_bytes, "timeout_s": min(who.timeout_s, self.limits.timeout_s)}
            answer(sock, terms, self._token, nonce, deadline_s)  # short enough never to block
            sock.setblocking(False)
            gathering = self._gathering.setdefault(key, _Gathering(who))
            self._addresses.setdefault(key, []).append(greeting.address)
            gathering.sockets[who.rank] = sock
            if len(gathering.sockets) == gathering.workers:
                del self._gathering[key]
                self._running[key] = AggregatedJob(gathering.sockets, self.limits, gathering.timeout_s)
                threading.Thread(target=self._run, args=(key,), name=f"dynamix-job-{who.job}", daemon=True).start()
        return None

    def _reason_against(self, who: Introduction, key: tuple[str, str]) -> ProtocolError | None:
        gathering = self._gathering.get(key)
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

    def _no_room(self, who: Introduction, key: tuple[str, str], address: str) -> ProtocolError | None:
        """Why a worker exceeds a limit. If it helps, jobs still incomplete after `GATHER_S` are dropped for it.

        Only connected workers use room, not those that a job announces. If a job lacks room for one of its workers, it
        is dropped at once: its ranks join together or not at all.
        """
        old, here, making_room = time.monotonic() - GATHER_S, dict(self._addresses), []
        waiting = [other for other, job in self._gathering.items() if other != key and job.since_s < old]
        while (why := beyond(self.limits, here, key, who.workers, address)) is not None and waiting:
            making_room.append(waiting.pop(0))  # oldest first
            del here[making_room[-1]]
        if why is None:
            for other in making_room:
                self._let_go(other, "stalled", "others asked for its room")
            return None
        if key in self._gathering:
            self._let_go(key, "limit", why)
        return ProtocolError("limit", why)

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
            del self._running[key], self._addresses[key]
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
        """Drop jobs whose workers do not all connect, or leave before all have."""
        now = time.monotonic()
        with self._lock:
            for key, gathering in list(self._gathering.items()):
                late = now - gathering.since_s > min(gathering.timeout_s, self.limits.timeout_s)
                if late or any(is_closed(sock) for sock in gathering.sockets.values()):
                    self._let_go(key, "stalled" if late else "left", "too late" if late else "one has left")

    def _let_go(self, key: tuple[str, str], kind: str, why: str) -> None:
        """End an incomplete job."""
        gathering, came = self._gathering.pop(key), len(self._addresses.pop(key))
        self._ended.append(key)
        self._failed[kind] += 1
        _log.warning("job %s: %d of its %d workers came: %s", key[0], came, gathering.workers, why)
        gathering.close()
