"""The exit of one interface: a rate by tbf and a latency by netem, changed while packets are on their way.

A queue that exists is changed, never replaced: replacing would drop what waits in it.
"""

from typing import Any

UNLIMITED_MBIT_S = 30_000.0  # what the kernel's 32 bits of bytes a second can nearly say
_QUEUE_MS = 50
_NETEM_PACKETS = 10_000


def set_rate(ip: Any, index: int, rate_mbit_s: float | None, *, delayed: bool) -> None:
    """A token bucket for what leaves `index`, under netem if `delayed`.

    Its depth is 4 ms of the rate, at least what one segment of TCP needs; its queue 50 ms, a small router's.
    """
    bytes_per_s = int((UNLIMITED_MBIT_S if rate_mbit_s is None else rate_mbit_s) * 1e6 / 8)
    burst = max(16 * 1024, bytes_per_s // 250)
    place = {"parent": "1:1"} if delayed else {"root": True}
    ip.tc("replace", "tbf", index, "10:", rate=bytes_per_s, burst=burst, latency=f"{_QUEUE_MS}ms", **place)


def set_latency(ip: Any, index: int, latency_ms: float) -> None:
    """Everything that leaves `index` leaves it `latency_ms` later. Before `set_rate(delayed=True)`."""
    ip.tc("replace", "netem", index, "1:", delay=round(latency_ms * 1000), limit=_NETEM_PACKETS, root=True)


def send_single_packets(ip: Any, index: int) -> None:
    """Traffic that leaves `index` is packets of the wire's size: a loss must not take a segment of 64 KB as if it were
    one."""
    ip.link("set", index=index, gso_max_segs=1)
