"""What workers and the aggregator say to each other: a handshake, then messages of at most one chunk of a buffer.

    aggregator   greeting, nonce
    worker       proof, JSON: who it is (`Introduction`) and a nonce of its own
    aggregator   proof, JSON: chunk_bytes, timeout_s; or why it is refused

A proof is an HMAC-SHA256 under the token of what was said and of the other side's nonce, so the token never travels and
no recorded handshake can be used again. The rest is neither encrypted nor signed. Checksums find damage, not malice.

A round is one buffer of all workers. It travels in chunks, each under a header that says where it belongs and ends in a
checksum over header and chunk. Numbers are little-endian, values as the machine holds them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError

Bytes = NDArray[np.uint8]
GREETING = b"dynamix aggregator 1\n"
NONCE_BYTES, PROOF_BYTES, MAX_BLOB = 32, 32, 4096
DATA, RESULT, FAILED = 1, 2, 3  # kinds of message
ADD, OR = 1, 2  # int32, wrapping around; uint8
HEADER = struct.Struct("<2sBBIQQQ4xI")
MAX_REASON_BYTES = 512
LEAST_CHUNK = 1 << 15
_MAGIC = b"DX"
_LANES = 512  # eight bytes each: the width at which long payloads are folded before the CRC


class ProtocolError(Exception):
    """The other side said something that cannot be right. `kind` is a word for counting."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class Head(NamedTuple):
    """A message's header: `length` bytes from `start` of a buffer of `total`, in round `round` of its connection."""

    kind: int
    op: int
    length: int
    round: int
    start: int
    total: int


def chunk_of(total: int, most: int) -> int:
    """The length of a round's chunks: an eighth of it, so that sums are on their way back while the rest is on its way
    in, but no more than `most` and no less than `LEAST_CHUNK` (each costs some 50 us of processor time).

    >>> chunk_of(200_000, 1 << 19), chunk_of(1 << 20, 1 << 19), chunk_of(1 << 30, 1 << 19)
    (32768, 131072, 524288)
    """
    return min(most, max(LEAST_CHUNK, -(-total // (8 * 4096)) * 4096))


def chunks(op: int, number: int, total: int, most: int) -> Iterator[Head]:
    """The headers of one round.

    >>> [(head.start, head.length) for head in chunks(ADD, 7, 1000, 400)]
    [(0, 400), (400, 400), (800, 200)]
    """
    size = chunk_of(total, most)
    for start in range(0, total, size):
        yield Head(DATA, op, min(size, total - start), number, start, total)


def checksum(first: bytes, payload: Bytes) -> int:
    """Of a header's fields and the payload: CRC32, of the column sums where the payload is long.

    Sums run at memory speed and change with every flipped bit; a shift or an exchange of whole rows of 4 KiB would be
    missed, and shows in the header's numbers instead.
    """
    crc = zlib.crc32(first)
    rows = payload.size // (8 * _LANES)
    if rows >= 4:
        folded = payload[: rows * 8 * _LANES].view(np.uint64).reshape(rows, _LANES)
        crc = zlib.crc32(np.add.reduce(folded, axis=0).tobytes(), crc)
        payload = payload[rows * 8 * _LANES :]
    return zlib.crc32(payload.data, crc)


def pack(head: Head, payload: Bytes) -> bytes:
    """The header of a message, HEADER.size bytes."""
    first = HEADER.pack(_MAGIC, *head, 0)[:-4]
    return first + struct.pack("<I", checksum(first, payload))


def unpack(header: bytes | bytearray | memoryview) -> Head:
    """The fields of a header; raises `ProtocolError`. Nothing is verified before the payload is there: see `verify`."""
    magic, *fields, _ = HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("damaged", "a message does not begin like one")
    return Head(*fields)


def verify(header: bytes | bytearray | memoryview, payload: Bytes) -> None:
    """Raises `ProtocolError` where header and payload do not fit their checksum."""
    if checksum(bytes(header[:-4]), payload) != HEADER.unpack(header)[-1]:
        raise ProtocolError("damaged", "a message does not fit its checksum")


@dataclass(frozen=True)
class Introduction:
    """Who asks to join. `session` tells runs of the same job apart; all of a run's ranks bring the same.

    timeout_s   how long the job may wait for one of its workers within a round
    """

    job: str
    session: str
    workers: int
    rank: int
    timeout_s: float

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Introduction:
        """From JSON; raises `ProtocolError` where something is missing or of another type."""
        try:
            job, session = ascii(str(fields["job"])[:64])[1:-1], str(fields["session"])[:64]  # the job is for logs
            made = cls(job, session, int(fields["workers"]), int(fields["rank"]), float(fields["timeout_s"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError("introduction", f"the introduction is not complete: {error}") from error
        if not (made.workers >= 1 and 0 <= made.rank < made.workers and made.timeout_s > 0):
            raise ProtocolError("introduction", f"rank {made.rank} of {made.workers} workers cannot be")
        return made


def proof(token: str, side: bytes, nonce: bytes, said: bytes) -> bytes:
    """What only a holder of the token can say about `said` after having been given `nonce`."""
    return hmac.new(token.encode(), side + nonce + said, hashlib.sha256).digest()


def greet(sock: socket.socket, nonce: bytes, deadline_s: float) -> None:
    """The aggregator's first words."""
    send_blob(sock, GREETING + nonce, deadline_s)


def introduce(sock: socket.socket, who: Introduction, token: str, nonce: bytes, deadline_s: float) -> dict[str, Any]:
    """The worker's side of the handshake. Returns the aggregator's terms; raises `ProtocolError` when refused."""
    greeting = receive_blob(sock, deadline_s)
    if len(greeting) != len(GREETING) + NONCE_BYTES or not greeting.startswith(GREETING):
        raise ProtocolError("introduction", "what answers there is no aggregator of this version")
    theirs = greeting[len(GREETING) :]
    said = json.dumps({**asdict(who), "nonce": nonce.hex()}).encode()
    send_blob(sock, proof(token, b"worker", theirs, said) + said, deadline_s)
    answer = receive_blob(sock, deadline_s)
    terms: dict[str, Any] = json.loads(answer[PROOF_BYTES:])
    if "refused" in terms:
        raise ProtocolError("refused", str(terms["refused"])[:MAX_REASON_BYTES])
    if not hmac.compare_digest(answer[:PROOF_BYTES], proof(token, b"aggregator", nonce, answer[PROOF_BYTES:])):
        raise ProtocolError("token", "the aggregator does not know the token")
    return terms


def hear(sock: socket.socket, token: str, nonce: bytes, deadline_s: float) -> tuple[Introduction, bytes]:
    """The aggregator's ear: who asks, and the nonce for the answer. Raises `ProtocolError`."""
    blob = receive_blob(sock, deadline_s)
    said = blob[PROOF_BYTES:]
    if not hmac.compare_digest(blob[:PROOF_BYTES], proof(token, b"worker", nonce, said)):
        raise ProtocolError("token", "wrong token")
    try:
        fields = json.loads(said)
        return Introduction.of(fields), bytes.fromhex(fields["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError("introduction", "the introduction is not the expected JSON") from error


def answer(sock: socket.socket, terms: dict[str, Any], token: str, nonce: bytes, deadline_s: float) -> None:
    """Terms, or {"refused": why}."""
    said = json.dumps(terms).encode()
    send_blob(sock, proof(token, b"aggregator", nonce, said) + said, deadline_s)


def send_blob(sock: socket.socket, blob: bytes, deadline_s: float) -> None:
    """One part of the handshake, before `deadline_s` of the monotonic clock; raises OSError."""
    sock.settimeout(_left(deadline_s))
    sock.sendall(struct.pack("<I", len(blob)) + blob)


def receive_blob(sock: socket.socket, deadline_s: float) -> bytes:
    """Raises OSError when it is late, `ProtocolError` for lengths that no handshake has and when the line ends."""
    (length,) = struct.unpack("<I", _exactly(sock, 4, deadline_s))
    if length > MAX_BLOB:
        raise ProtocolError("introduction", "what was said is no handshake")
    return _exactly(sock, length, deadline_s)


def _exactly(sock: socket.socket, length: int, deadline_s: float) -> bytes:
    found = b""
    while len(found) < length:
        sock.settimeout(_left(deadline_s))
        part = sock.recv(length - len(found))
        if not part:
            raise ProtocolError("introduction", "the connection was closed during the handshake")
        found += part
    return found


def _left(deadline_s: float) -> float:
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left


def parse_address(address: str, *, name: str = "aggregator") -> tuple[str, int]:
    """Host and port.

    >>> parse_address("10.0.0.7:5123"), parse_address("[::1]:80")
    (('10.0.0.7', 5123), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(name, address, "host:port", "give what the aggregator printed when it started")
    return host.strip("[]"), int(port)
