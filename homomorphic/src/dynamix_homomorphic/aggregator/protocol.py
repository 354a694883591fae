"""The messages between workers and the aggregator after the handshake. Each carries one chunk of a buffer.

A round is one buffer of all workers. It is sent in chunks. Each has a header with its place, which ends in a checksum
over header and chunk. Checksums detect damage, not malice. Header fields are little-endian; values are in the machine's
byte order. `handshake` describes how a worker joins.
"""

from __future__ import annotations

import contextlib
import ipaddress
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError

Bytes = NDArray[np.uint8]
DATA, RESULT, FAILED = 1, 2, 3  # kinds of message
ADD, OR = 1, 2  # int32, wrapping around; uint8
HEADER = struct.Struct("<2sBBIQQQ4xI")
MAX_REASON_BYTES = 512
LEAST_CHUNK = 1 << 15
_MAGIC = b"DX"
_LANES = 512  # columns of eight bytes: long payloads are folded to this width before the CRC


class ProtocolError(Exception):
    """The other side sent something invalid. `kind` is the category for counters."""

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
    """The length of a round's chunks: an eighth of it, so that sums return while the rest is still being sent, but at
    most `most` and at least `LEAST_CHUNK` (each chunk costs about 50 us of processor time).

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


def folded(payload: Bytes) -> bytes | memoryview:
    """The bytes that the checksum is taken of: for a long payload its column sums, and the remainder.

    Sums run at memory speed, and every flipped bit changes them. They miss a shift or an exchange of whole rows of
    4 KiB; the header's numbers detect those.
    """
    rows = payload.size // (8 * _LANES)
    if rows < 4:
        return payload.data
    whole = payload[: rows * 8 * _LANES].view(np.uint64).reshape(rows, _LANES)
    sums: bytes = np.add.reduce(whole, axis=0).tobytes()
    return sums + payload[rows * 8 * _LANES :].tobytes()


def pack(head: Head, payload: Bytes, *, fold: bytes | memoryview | None = None) -> bytes:
    """The header of a message, HEADER.size bytes. `fold` is `folded(payload)` if it is already computed."""
    first = HEADER.pack(_MAGIC, *head, 0)[:-4]
    return first + struct.pack("<I", _checksum(first, folded(payload) if fold is None else fold))


def _checksum(first: bytes, fold: bytes | memoryview) -> int:
    return zlib.crc32(fold, zlib.crc32(first))


def unpack(header: bytes | bytearray | memoryview) -> Head:
    """The fields of a header. Raises `ProtocolError`. The checksum needs the payload: see `verify`."""
    magic, *fields, _ = HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("damaged", "a message does not begin like one")
    return Head(*fields)


def verify(header: bytes | bytearray | memoryview, payload: Bytes) -> None:
    """Raise `ProtocolError` if header and payload do not match their checksum."""
    if _checksum(bytes(header[:-4]), folded(payload)) != HEADER.unpack(header)[-1]:
        raise ProtocolError("damaged", "a message does not fit its checksum")


def parse_address(address: str, *, name: str = "aggregator") -> tuple[str, int]:
    """Host and port.

    >>> parse_address("10.0.0.7:5123"), parse_address("[::1]:80")
    (('10.0.0.7', 5123), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(name, address, "host:port", "give what the aggregator printed when it started")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("10.1.2.3")
    (True, True, False, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
