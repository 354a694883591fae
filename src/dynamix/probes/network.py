"""Measures this worker's connections to other workers, from the kernel's statistics of each socket (TCP_INFO).

Works without root. `getsockopt` reads from the descriptor itself. Nothing is duplicated, so no socket can be closed by
accident or stay open after its owner's close.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TCP_INFO = 11
SO_COOKIE = 57
_ESTABLISHED = 1
# The start of the kernel's struct tcp_info, which has only grown at its end, up to byte 136: state, rtt (us, at 68),
# total_retrans (at 100), bytes_acked (at 120), bytes_received.
_TCP_INFO = struct.Struct("=B67xI28xI16xQQ")
# A socket that moved less than this part of the busiest one's bytes is a control channel, not the ring.
_RING_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Connection:
    """The kernel's counts for one TCP connection. Bytes are payload acknowledged or sent by the peer."""

    sent_bytes: int
    received_bytes: int
    retransmits: int
    rtt_s: float

    def since(self, earlier: Connection | None) -> Connection:
        """The counts added after `earlier`; everything if the connection is new."""
        if earlier is None:
            return self
        sent, received = self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes
        return Connection(sent, received, self.retransmits - earlier.retransmits, self.rtt_s)

    @property
    def moved_bytes(self) -> int:
        """Bytes in both directions."""
        return self.sent_bytes + self.received_bytes


class NetworkProbe:
    """Traffic of the process group's own connections.

    bytes_per_s           payload sent and acknowledged per second: in a ring all-reduce of n bytes each worker sends
                          2(W-1)/W n. Comparable with the rate of one direction of a full-duplex link
    retransmits_per_s     segments sent again per second
    rtt_s                 smoothed round-trip time, mean weighted by bytes moved; NaN if nothing moved

    Counts all connections of this process that moved at least 2 % of the busiest one's bytes since the previous sample.
    So idle control groups are left out. Connections of the rendezvous store (`store_port`, by default MASTER_PORT) do
    not count. NVLink, InfiniBand and shared memory are not seen; without TCP traffic all is NaN. Linux only.
    """

    name = "network"

    def __init__(self, *, store_port: int | None = None) -> None:
        self._store_port = master_port() if store_port is None else store_port
        self._store: set[int] = set()
        self._sampled_at = time.perf_counter()
        self._before = self._others(open_connections())

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(available, why or how). Sends a few bytes to itself over loopback, because some sandboxes count nothing."""
        if not sys.platform.startswith("linux"):
            return False, f"TCP_INFO is read on Linux only, this is {sys.platform}"
        try:
            sent, fields = _counted_over_loopback()
        except OSError as error:
            return False, f"the kernel refused: {error}"
        if sent <= 0:
            return False, "this kernel does not count bytes per socket (before Linux 4.2, or a sandbox such as gVisor)"
        return True, f"TCP_INFO of own sockets, {fields} bytes of it, no privileges needed"

    def sample(self) -> dict[str, float]:
        """`bytes_per_s`, `retransmits_per_s`, `rtt_s` since the previous sample or the probe's construction."""
        now, after = time.perf_counter(), self._others(open_connections())
        added = [connection.since(self._before.get(key)) for key, connection in after.items()]
        elapsed, self._sampled_at, self._before = now - self._sampled_at, now, after
        busiest = max((c.moved_bytes for c in added), default=0)
        if elapsed <= 0 or not any(c.moved_bytes for c in after.values()):
            return dict.fromkeys(("bytes_per_s", "retransmits_per_s", "rtt_s"), math.nan)
        ring = [c for c in added if c.moved_bytes >= max(1.0, _RING_SHARE * busiest)]
        weights = sum(c.moved_bytes for c in ring if c.rtt_s > 0)
        rtt = sum(c.moved_bytes * c.rtt_s for c in ring) / weights if weights else math.nan
        sent, again = sum(c.sent_bytes for c in ring), sum(c.retransmits for c in ring)
        return {"bytes_per_s": sent / elapsed, "retransmits_per_s": again / elapsed, "rtt_s": rtt}

    def _others(self, connections: dict[int, tuple[int, Connection]]) -> dict[int, Connection]:
        """The connections without those of the store."""
        known = self._before.keys() if hasattr(self, "_before") else set()
        for key, (fd, _) in connections.items():
            # A connection's ports never change, so they are looked up only once.
            if key not in known and key not in self._store and self._store_port in ports(fd):
                self._store.add(key)
        self._store &= connections.keys()
        return {key: connection for key, (_, connection) in connections.items() if key not in self._store}


def open_connections() -> dict[int, tuple[int, Connection]]:
    """The established TCP connections of this process: kernel's identity -> (descriptor, counts).

    Unlike a descriptor, an identity is never used again. Empty if the system has no such statistics.
    """
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return {}
    info, cookie = _Option(socket.IPPROTO_TCP, TCP_INFO, 256), _Option(socket.SOL_SOCKET, SO_COOKIE, 8)
    found: dict[int, tuple[int, Connection]] = {}
    for fd in descriptors:
        answer = info.read(fd)  # fails cheaply on anything that is not TCP
        connection = parse_tcp_info(answer) if answer else None
        if connection is not None:
            identity = cookie.read(fd)
            found[int.from_bytes(identity, sys.byteorder) if identity else fd] = (fd, connection)
    return found


def parse_tcp_info(info: bytes) -> Connection | None:
    """The counts in the kernel's answer; None unless established. A field that an older kernel lacks is zero."""
    state, rtt_us, retransmits, acked, received = _TCP_INFO.unpack_from(info.ljust(_TCP_INFO.size, b"\0"))
    if state != _ESTABLISHED:
        return None
    return Connection(acked, received, retransmits, rtt_us * 1e-6)


def ports(fd: int) -> tuple[int, int]:
    """Local and remote port of a connection; 0 if it has none."""
    # sockaddr_in and sockaddr_in6 both hold the port, in network order, in bytes 2 to 4.
    local, remote = (_address(fd, name)[2:4] for name in ("getsockname", "getpeername"))
    return int.from_bytes(local, "big"), int.from_bytes(remote, "big")


def ends(fd: int) -> tuple[str, str]:
    """Local and remote address and port of a connection; its peer has the same two in reverse order.

    >>> with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    ...     accepted, _ = server.accept()
    ...     with accepted:
    ...         ends(client.fileno()) == ends(accepted.fileno())[::-1]
    True
    """
    local, remote = (_address(fd, name) for name in ("getsockname", "getpeername"))
    # After the port: the four bytes of IPv4, or IPv6's flow and its address, whose last bytes are a mapped IPv4.
    return _end(local), _end(remote)


def _end(address: bytes) -> str:
    return (address[2:4] + (address[20:24] if len(address) > 16 else address[4:8])).hex()


def master_port() -> int:
    """The port of the rendezvous store; -1 if the environment does not name it."""
    try:
        return int(os.environ.get("MASTER_PORT", "-1"))
    except ValueError:
        return -1


def _counted_over_loopback() -> tuple[int, int]:
    """(bytes the kernel counted for a small transfer, length of its TCP_INFO)."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(bytes(4096))
            received = 0
            while received < 4096:
                received += len(accepted.recv(4096))
            info = _Option(socket.IPPROTO_TCP, TCP_INFO, 256).read(accepted.fileno())
    connection = parse_tcp_info(info)
    return (connection.moved_bytes if connection else 0), len(info)


@functools.cache
def _libc(name: str, *numbers: Any) -> Callable[..., int]:
    """A socket call of the C library on a plain descriptor; Python's own calls need a socket object, which owns it.

    Its arguments: the descriptor, `numbers` of these types, a buffer and its length.
    """
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_int, *numbers, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint)]
    call: Callable[..., int] = function
    return call


class _Option:
    """One socket option, read from many descriptors into one buffer."""

    def __init__(self, level: int, option: int, size: int) -> None:
        self._function = _libc("getsockopt", ctypes.c_int, ctypes.c_int)
        self._level, self._option, self._size = level, option, size
        self._buffer, self._length = ctypes.create_string_buffer(size), ctypes.c_uint(size)
        self._length_at = ctypes.byref(self._length)

    def read(self, fd: int) -> bytes:
        """The option's value; empty if `fd` is closed, no socket, or of another kind."""
        self._length.value = self._size
        if self._function(fd, self._level, self._option, self._buffer, self._length_at) != 0:
            return b""
        return self._buffer.raw[: self._length.value]


def _address(fd: int, name: str) -> bytes:
    buffer, length = ctypes.create_string_buffer(128), ctypes.c_uint(128)
    if _libc(name)(fd, buffer, ctypes.byref(length)) != 0:
        return b""
    return buffer.raw[: min(length.value, 128)]
