"""The exit of one interface: a rate by tbf and a latency by netem, which can change while packets are in flight.

An existing queue is changed, never replaced: replacing would drop its packets.
"""

from typing import Any

UNLIMITED_MBIT_S = 30_000.0  # about the maximum of the kernel's 32 bits of bytes a second
_QUEUE_MS = 50
_NETEM_PACKETS = 10_000


def set_rate(ip: Any, index: int, rate_mbit_s: float | None, *, delayed: bool) -> None:
    """Limit traffic that leaves `index` by a token bucket, below netem if `delayed`.

    Its depth is 4 ms of the rate, at least one segment of TCP. Its queue is 50 ms, as in a small router.
    """
    bytes_per_s = int((UNLIMITED_MBIT_S if rate_mbit_s is None else rate_mbit_s) * 1e6 / 8)
    burst = max(16 * 1024, bytes_per_s // 250)
    place = {"parent": "1:1"} if delayed else {"root": True}
    ip.tc("replace", "tbf", index, "10:", rate=bytes_per_s, burst=burst, latency=f"{_QUEUE_MS}ms", **place)


def set_latency(ip: Any, index: int, latency_ms: float) -> None:
    """Delay all traffic that leaves `index` by `latency_ms`. Call it before `set_rate(delayed=True)`."""
    ip.tc("replace", "netem", index, "1:", delay=round(latency_ms * 1000), limit=_NETEM_PACKETS, root=True)


def send_single_packets(ip: Any, index: int) -> None:
    """Send traffic that leaves `index` in packets of the wire's size. Otherwise one loss would drop a whole segment of
    64 KB."""
    ip.link("set", index=index, gso_max_segs=1)
