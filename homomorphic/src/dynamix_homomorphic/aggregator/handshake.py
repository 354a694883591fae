"""How a worker is let in: who it is, and a proof on both sides that they hold the same token.

    worker       the word `PLAIN`, on a line without TLS
    aggregator   greeting, nonce
    worker       proof, JSON: who it is (`Introduction`) and a nonce of its own
    aggregator   proof, JSON: chunk_bytes, timeout_s; or why it is refused

A proof is an HMAC-SHA256 under the token of what was said and of the other side's nonce, so the token never travels and
no recorded handshake can be used again. Each part is at most `MAX_PART_BYTES` long, its JSON one flat object.
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
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')  # of JSON


@dataclass(frozen=True)
class Introduction:
    """The introduction of a worker that asks to join. `session` tells runs of the same job apart; all of a run's ranks
    bring the same.

    timeout_s   how long the job may wait for one of its workers within a round
    """

    job: str
    session: str
    workers: int
    rank: int
    timeout_s: float

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Introduction:
        """An introduction from JSON; raises `ProtocolError` if something is missing or of another type."""
        job, session = (_typed(fields, name, str)[:64] for name in ("job", "session"))
        workers, rank = (_typed(fields, name, int) for name in ("workers", "rank"))
        timeout_s = _typed(fields, "timeout_s", float)
        if not (1 <= workers <= MOST_WORKERS and 0 <= rank < workers and timeout_s > 0):
            raise ProtocolError("introduction", f"rank {rank} of {workers} workers cannot be")
        return cls(ascii(job)[1:-1], session, workers, rank, timeout_s)  # the job's name is for logs


def proof(token: str, side: bytes, nonce: bytes, said: bytes) -> bytes:
    """The proof about `said` that only a holder of the token can give after `nonce`."""
    return hmac.new(token.encode(), side + nonce + said, hashlib.sha256).digest()


def greet(sock: socket.socket, nonce: bytes, deadline_s: float) -> None:
    """The aggregator's first words."""
    send_part(sock, GREETING + nonce, deadline_s)


def introduce(sock: socket.socket, who: Introduction, token: str, nonce: bytes, deadline_s: float) -> dict[str, Any]:
    """The worker's side of the handshake. Returns the aggregator's terms; raises `ProtocolError` when refused."""
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
    """The aggregator's check on a line without TLS. Raises `ProtocolError` if the worker speaks something else."""
    first = _exactly(sock, len(PLAIN), deadline_s)
    if first[0] == FIRST_BYTE:
        raise ProtocolError("tls", "the worker speaks TLS, and this aggregator has no certificate")
    if first != PLAIN:
        raise ProtocolError("introduction", "what asks is no worker of this version")


def hear(sock: socket.socket, token: str, nonce: bytes, deadline_s: float) -> tuple[Introduction, bytes]:
    """The aggregator's ear: who asks, and the nonce for the answer. Raises `ProtocolError`."""
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
    """Terms, or {"refused": why}."""
    said = json.dumps(terms).encode()
    send_part(sock, proof(token, b"aggregator", nonce, said) + said, deadline_s)


def flat_object(said: bytes) -> dict[str, Any]:
    """A JSON object without containers inside, its numbers finite. Raises `ProtocolError` for everything else.

    >>> flat_object(b'{"rank": 3}')
    {'rank': 3}
    """
    try:
        text = said.decode()  # the parser itself would take UTF-16, too
        bare = _TEXTS.sub("", text)
        if bare.count("{") != 1 or "[" in bare:  # known before a parser follows it inwards
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
    """A field of the type that it must have; whole numbers of 64 bits pass as floats."""
    value: Any = fields.get(name)
    if kind is float and type(value) is int and abs(value) < 1 << 63:
        value = float(value)
    if type(value) is not kind or (kind is int and abs(value) >= 1 << 63):
        raise ProtocolError("introduction", f"{name} is {'missing' if value is None else 'of another type'}")
    return value


def send_part(sock: socket.socket, part: bytes, deadline_s: float) -> None:
    """One part of the handshake, before `deadline_s` of the monotonic clock; raises OSError."""
    sock.settimeout(seconds_left(deadline_s))
    sock.sendall(struct.pack("<I", len(part)) + part)


def receive_part(sock: socket.socket, deadline_s: float) -> bytes:
    """Raises OSError when it is late, `ProtocolError` for lengths that no handshake has and when the line ends."""
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
    """Until `deadline_s` of the monotonic clock; raises TimeoutError after it."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left
