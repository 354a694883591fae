"""The speed of links, measured from the exchanges themselves: seconds a hop, and seconds a byte."""

from __future__ import annotations

SMALL_BYTES, LARGE_BYTES = 4096, 16384  # up to the first only hops cost time; from the second on bytes do too


class LinkSpeed:
    """Times of collectives on one rank. Take the least over ranks: the rank that arrives last does not wait.

    >>> speed = LinkSpeed()
    >>> speed.note(24, hops=1, seconds=0.001)
    >>> speed.note(1_000_000, hops=1, seconds=0.101)
    >>> speed.hop_s, round(speed.byte_s * 1e9)
    (0.001, 100)
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Drop all measurements."""
        self.hop_s = float("inf")
        self._large: list[tuple[int, int, float]] = []

    def note(self, sent_bytes: int, hops: int, seconds: float) -> None:
        """Record one call: bytes in the busiest direction of this rank's link, and messages in sequence."""
        if hops and sent_bytes <= SMALL_BYTES:
            self.hop_s = min(self.hop_s, seconds / hops)
        elif hops and sent_bytes >= LARGE_BYTES:
            self._large = [*self._large[-15:], (sent_bytes, hops, seconds)]

    @property
    def byte_s(self) -> float:
        """Least seconds a byte, without the hops; infinite before a large call."""
        hop = 0.0 if self.hop_s == float("inf") else self.hop_s
        return min((max(took - hops * hop, 0.0) / sent for sent, hops, took in self._large), default=float("inf"))
