"""How a worker joins: it introduces itself, and both sides prove that they hold the same token.

    worker       the word `PLAIN`, on a connection without TLS
    aggregator   greeting, nonce
    worker       proof, JSON: the `Introduction` and a nonce of its own
    aggregator   proof, JSON: chunk_bytes, timeout_s; or the reason for refusing

A proof is an HMAC-SHA256, with the token as key, of the message and the other side's nonce. So the token is never sent,
and a recorded handshake cannot be replayed. Each part has at most `MAX_PART_BYTES`; its JSON is one flat object.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import socket
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from dynamix_homomorphic.aggregator.protocol import MAX_REASON_BYTES, ProtocolError
from dynamix_homomorphic.aggregator.tls import FIRST_BYTE, SPEAK_TLS

GREETING = b"dynamix aggregator 2\n"
ONLY_TLS = b"dynamix aggregator: TLS only\n"
PLAIN = b"dynamix worker 2\n"
NONCE_BYTES, PROOF_BYTES, MAX_PART_BYTES = 32, 32, 4096
MOST_WORKERS = 1 << 20
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')  # strings in JSON


@dataclass(frozen=True)
class Introduction:
    """The introduction of a worker that asks to join. `session` distinguishes runs of the same job; all ranks of a run
    send the same.

    timeout_s   how long the job may wait for one of its workers within a round
    """

    job: str
    session: str
    workers: int
    rank: int
    timeout_s: float

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Introduction:
        """Read an introduction from JSON. Raises `ProtocolError` if a field is missing or has the wrong type."""
        job, session = (_typed(fields, name, str)[:64] for name in ("job", "session"))
        workers, rank = (_typed(fields, name, int) for name in ("workers", "rank"))
        timeout_s = _typed(fields, "timeout_s", float)
        if not (1 <= workers <= MOST_WORKERS and 0 <= rank < workers and timeout_s > 0):
            raise ProtocolError("introduction", f"rank {rank} of {workers} workers cannot be")
        return cls(ascii(job)[1:-1], session, workers, rank, timeout_s)  # escaped for logs


def proof(token: str, side: bytes, nonce: bytes, said: bytes) -> bytes:
    """The proof for `said`. Only a holder of the token can compute it for this `nonce`."""
    return hmac.new(token.encode(), side + nonce + said, hashlib.sha256).digest()


def greet(sock: socket.socket, nonce: bytes, deadline_s: float) -> None:
    """The aggregator's first message."""
    send_part(sock, GREETING + nonce, deadline_s)


def introduce(sock: socket.socket, who: Introduction, token: str, nonce: bytes, deadline_s: float) -> dict[str, Any]:
    """The worker's side of the handshake. Returns the aggregator's terms. Raises `ProtocolError` if refused."""
    greeting = receive_part(sock, deadline_s)
    if greeting == ONLY_TLS:
        raise ProtocolError("tls", f"the aggregator is reached by TLS only: {SPEAK_TLS}")
    if len(greeting) != len(GREETING) + NONCE_BYTES or not greeting.startswith(GREETING):
        raise ProtocolError("introduction", "what answers there is no aggregator of this version")
    theirs = greeting[len(GREETING) :]
    said = json.dumps({**asdict(who), "nonce": nonce.hex()}).encode()
    send_part(sock, proof(token, b"worker", theirs, said) + said, deadline_s)
    answered = receive_part(sock, deadline_s)
    terms = flat_object(answered[PROOF_BYTES:])
    if "refused" in terms:
        raise ProtocolError("refused", str(terms["refused"])[:MAX_REASON_BYTES])
    if not hmac.compare_digest(answered[:PROOF_BYTES], proof(token, b"aggregator", nonce, answered[PROOF_BYTES:])):
        raise ProtocolError("token", "the aggregator does not know the token")
    chunk_bytes, timeout_s = _typed(terms, "chunk_bytes", int), _typed(terms, "timeout_s", float)
    if chunk_bytes < 4 or chunk_bytes % 4 or not timeout_s > 0:
        raise ProtocolError("introduction", f"its terms cannot be: {terms}")
    return {"chunk_bytes": chunk_bytes, "timeout_s": timeout_s}


def require_plain(sock: socket.socket, deadline_s: float) -> None:
    """The aggregator's check of a connection without TLS. Raises `ProtocolError` if the worker sends anything else."""
    first = _exactly(sock, len(PLAIN), deadline_s)
    if first[0] == FIRST_BYTE:
        raise ProtocolError("tls", "the worker speaks TLS, and this aggregator has no certificate")
    if first != PLAIN:
        raise ProtocolError("introduction", "what asks is no worker of this version")


def hear(sock: socket.socket, token: str, nonce: bytes, deadline_s: float) -> tuple[Introduction, bytes]:
    """Receive a worker's introduction, and the nonce for the answer. Raises `ProtocolError`."""
    part = receive_part(sock, deadline_s)
    said = part[PROOF_BYTES:]
    if not hmac.compare_digest(part[:PROOF_BYTES], proof(token, b"worker", nonce, said)):
        raise ProtocolError("token", "wrong token")
    fields = flat_object(said)
    try:
        theirs = bytes.fromhex(_typed(fields, "nonce", str))
    except ValueError as error:
        raise ProtocolError("introduction", "the worker's nonce is not hexadecimal") from error
    if len(theirs) != NONCE_BYTES:
        raise ProtocolError("introduction", f"a nonce of {len(theirs)} bytes: {NONCE_BYTES} are due")
    return Introduction.of(fields), theirs


def answer(sock: socket.socket, terms: dict[str, Any], token: str, nonce: bytes, deadline_s: float) -> None:
    """Send the terms, or {"refused": reason}."""
    said = json.dumps(terms).encode()
    send_part(sock, proof(token, b"aggregator", nonce, said) + said, deadline_s)


def flat_object(said: bytes) -> dict[str, Any]:
    """Parse a JSON object without nested containers and with finite numbers. Raises `ProtocolError` otherwise.

    >>> flat_object(b'{"rank": 3}')
    {'rank': 3}
    """
    try:
        text = said.decode()  # the parser itself would also accept UTF-16
        bare = _TEXTS.sub("", text)
        if bare.count("{") != 1 or "[" in bare:  # first, because the parser would recurse into them
            raise ValueError("it is not one flat object")
        fields = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError("introduction", f"what was said is not the expected JSON: {str(error)[:200]}") from error
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is too large")
    return value


def _typed(fields: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """A field of the required type. Whole numbers of up to 64 bits are accepted as floats."""
    value: Any = fields.get(name)
    if kind is float and type(value) is int and abs(value) < 1 << 63:
        value = float(value)
    if type(value) is not kind or (kind is int and abs(value) >= 1 << 63):
        raise ProtocolError("introduction", f"{name} is {'missing' if value is None else 'of another type'}")
    return value


def send_part(sock: socket.socket, part: bytes, deadline_s: float) -> None:
    """Send one part of the handshake before `deadline_s` of the monotonic clock. Raises OSError."""
    sock.settimeout(seconds_left(deadline_s))
    sock.sendall(struct.pack("<I", len(part)) + part)


def receive_part(sock: socket.socket, deadline_s: float) -> bytes:
    """Receive one part. Raises OSError if it is late, `ProtocolError` if its length is invalid or the peer closes."""
    (length,) = struct.unpack("<I", _exactly(sock, 4, deadline_s))
    if length > MAX_PART_BYTES:
        raise ProtocolError("introduction", "what was said is no handshake")
    return _exactly(sock, length, deadline_s)


def _exactly(sock: socket.socket, length: int, deadline_s: float) -> bytes:
    found = bytearray()
    while len(found) < length:
        sock.settimeout(seconds_left(deadline_s))
        part = sock.recv(length - len(found))
        if not part:
            raise ProtocolError("introduction", "the connection was closed during the handshake")
        found += part
    return bytes(found)


def seconds_left(deadline_s: float) -> float:
    """Seconds until `deadline_s` of the monotonic clock. Raises TimeoutError after it."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left
