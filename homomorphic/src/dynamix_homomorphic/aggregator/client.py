"""A worker's connection to an aggregator: buffers are sent in chunks while their sums come back.

A result overwrites the buffer that it was sent from, which is safe: a chunk returns only after all of it has left. Any
failure closes the connection for good and raises `WireLost`: a broken or silent connection, a damaged or unexpected
message, or a job ended by the aggregator. The buffers of that call are then invalid.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
import weakref
from dataclasses import dataclass, field

import numpy as np

from dynamix.compression.wire import WireLost
from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator import protocol
from dynamix_homomorphic.aggregator.handshake import NONCE_BYTES, PLAIN, Introduction, introduce
from dynamix_homomorphic.aggregator.protocol import HEADER, Bytes, Head, ProtocolError, is_loopback, parse_address
from dynamix_homomorphic.aggregator.tls import WOULD_BLOCK, PathText, TlsFiles, explained, send_both, shut

CONNECT_S = 30.0
GRACE = 1.25  # so that the aggregator reports which worker stalls before we report the aggregator


@dataclass(frozen=True)
class Aggregator:
    """The address of an aggregator, and the credentials for it.

    address     host:port
    token       the token that the aggregator was started with; it is never sent
    job         a name for the aggregator's log
    timeout_s   how long ranks may wait for each other within a bucket before they give up the aggregator. A process
                that dies is noticed at once; this is for hosts that vanish, and for ranks that are busy otherwise
    tls_cert, tls_key, tls_ca   PEM files: this worker's certificate, its key, and the authority that must have signed
                the aggregator's certificate. Beyond loopback these and the token are required
    """

    address: str
    token: str = field(default="", repr=False)
    job: str = "training"
    timeout_s: float = 300.0
    tls_cert: PathText = ""
    tls_key: PathText = ""
    tls_ca: PathText = ""

    def __post_init__(self) -> None:
        host, _ = parse_address(self.address)
        if not 0 < self.timeout_s <= 86_400:
            raise ConfigError("timeout_s", self.timeout_s, "above 0, up to 86400", "leave it out for 300")
        if not 1 <= len(self.job) <= 64:
            raise ConfigError("job", self.job, "names of 1 to 64 characters", "leave it out")
        tls = self.tls
        if not (self.token and tls) and not is_loopback(host):
            allowed = "a loopback address without a token and TLS"
            raise ConfigError("aggregator", self.address, allowed, "pass token, tls_cert, tls_key and tls_ca")

    @property
    def tls(self) -> TlsFiles | None:
        """The three files, or None if none is given. Raises `ConfigError` if only some are given."""
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)


class AggregatorClient:
    """One rank's connection. Only one thread may use it at a time. All ranks make the same calls in the same order.

    `reason` says why it was lost. It is empty while the connection works.
    """

    def __init__(self, sock: socket.socket, *, chunk_bytes: int, timeout_s: float) -> None:
        self.chunk_bytes, self.timeout_s, self.reason = chunk_bytes, timeout_s, ""
        self._sock, self._rounds = sock, 0
        self._poll = select.poll()
        sock.setblocking(False)
        self._closer = weakref.finalize(self, sock.close)

    @classmethod
    def connect(
        cls, where: Aggregator, *, session: str, workers: int, rank: int, patience_s: float = CONNECT_S
    ) -> AggregatorClient:
        """Join a job. Raises `WireLost` if there is no answer or the aggregator refuses, `ConfigError` if certificates
        cannot be read.
        """
        context = where.tls.client() if where.tls else None
        deadline = time.monotonic() + patience_s
        who = Introduction(where.job, session, workers, rank, where.timeout_s)
        sock = None
        try:
            sock = socket.create_connection(parse_address(where.address), timeout=patience_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is None:
                sock.sendall(PLAIN)
            else:
                host, _ = parse_address(where.address)
                sock = context.wrap_socket(sock, server_hostname=host)
            terms = introduce(sock, who, where.token, secrets.token_bytes(NONCE_BYTES), deadline)
            return cls(sock, **terms)
        except (OSError, ProtocolError, ValueError) as error:
            if sock is not None:
                sock.close()
            raise WireLost(f"{where.address}: {explained(error)}") from error

    def reduce_(self, *parts: tuple[int, Bytes]) -> None:
        """Replace each part, an operation (ADD, OR) and its bytes, by the result over all ranks.

        Parts are sent one after another without waiting in between. Empty parts are skipped.
        """
        if self.reason:
            raise WireLost(self.reason)
        plan = []
        for op, buffer in parts:
            heads = protocol.chunks(op, self._rounds, buffer.size, self.chunk_bytes)
            plan += [(head, buffer[head.start : head.start + head.length]) for head in heads]
            self._rounds += buffer.size > 0
        try:
            _Stream(self._sock, self._poll, plan).run(self.timeout_s * GRACE + 1)
        except (OSError, ProtocolError) as error:
            self.close(explained(error))
            raise WireLost(self.reason) from error

    def close(self, reason: str = "closed") -> None:
        """Leave. Between rounds this is orderly. Within a round it ends the job for all ranks at once."""
        self.reason = self.reason or reason or "lost"
        if self._closer.alive:
            shut(self._sock)  # forked children also hold the connection open
            self._closer()


class _Stream:
    """The chunks of one call, and how many of them are sent and received."""

    def __init__(self, sock: socket.socket, poll: select.poll, plan: list[tuple[Head, Bytes]]) -> None:
        self._sock, self._poll, self._plan = sock, poll, plan
        self._sending = self._received = 0  # chunks
        self._header, self._sent = b"", 0  # the chunk being sent: its header, and bytes sent
        self._broken: OSError | None = None
        self._incoming, self._got = bytearray(HEADER.size), 0
        self._due: Head | None = None  # the header whose payload is arriving

    def run(self, patience_s: float) -> None:
        """Run until all results have arrived. Raises OSError and `ProtocolError`."""
        moved_s = time.monotonic()
        while self._received < len(self._plan):
            sent, received, now = self._send(), self._receive(), time.monotonic()
            if sent or received:
                moved_s = now
            elif now - moved_s > patience_s:
                raise TimeoutError(f"the aggregator was silent for {patience_s:.3g} s")
            else:
                sending = self._sending < len(self._plan) and self._broken is None
                self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if sending else 0))
                self._poll.poll(int(1000 * (patience_s - (now - moved_s))) + 1)

    def _send(self) -> bool:
        """Send as much of one chunk as possible without waiting. Returns whether anything was sent."""
        if self._sending == len(self._plan) or self._broken is not None:
            return False
        head, payload = self._plan[self._sending]
        if not self._sent:
            self._header = protocol.pack(head, payload)
        try:
            if self._sent < HEADER.size:
                went = send_both(self._sock, self._header[self._sent :], payload.data)
            else:
                went = self._sock.send(payload.data[self._sent - HEADER.size :])
        except WOULD_BLOCK:
            return False
        except OSError as error:  # the aggregator may have sent a reason before it closed
            self._broken = error
            return False
        self._sent += went
        if self._sent == HEADER.size + head.length:
            self._sending, self._sent = self._sending + 1, 0
        return True

    def _receive(self) -> bool:
        """Receive the available part of one message. Returns whether anything was received."""
        moved = False
        while self._received < len(self._plan):
            into = memoryview(self._incoming) if self._due is None else self._plan[self._received][1].data
            try:
                got = self._sock.recv_into(into[self._got :])
            except WOULD_BLOCK:
                return moved
            if not got:
                raise self._broken or ConnectionError("the aggregator closed the connection")
            moved = True
            self._got += got
            if self._got < len(into):
                continue
            self._got = 0
            if self._due is None:
                self._due = self._expected(protocol.unpack(self._incoming))
            else:
                protocol.verify(self._incoming, self._plan[self._received][1])
                self._due, self._received = None, self._received + 1
                return True
        return moved

    def _expected(self, head: Head) -> Head:
        if head.kind == protocol.FAILED and head.length <= protocol.MAX_REASON_BYTES:
            raise ProtocolError("failed", "the aggregator ended the job: " + self._last_words(head.length))
        if head != self._plan[self._received][0]._replace(kind=protocol.RESULT) or self._received >= self._sending:
            raise ProtocolError("order", f"{head} arrived where another result was due")
        return head

    def _last_words(self, length: int) -> str:
        words, got = bytearray(length), 0
        with contextlib.suppress(OSError):
            while got < length and (part := self._sock.recv_into(memoryview(words)[got:])):
                got += part
        protocol.verify(self._incoming, np.frombuffer(words, np.uint8))
        return words.decode(errors="replace")
