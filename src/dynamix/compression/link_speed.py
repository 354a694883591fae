"""How fast ranks reach each other, read off the exchanges themselves: seconds a hop, and seconds a byte."""

from __future__ import annotations

SMALL_BYTES, LARGE_BYTES = 4096, 16384  # below: nothing but hops; above: bytes count


class LinkSpeed:
    """Times of collectives on one rank. The rank that arrives last waits for nobody: take the least over ranks.

    >>> speed = LinkSpeed()
    >>> speed.note(24, hops=1, seconds=0.001)
    >>> speed.note(1_000_000, hops=1, seconds=0.101)
    >>> speed.hop_s, round(speed.byte_s * 1e9)
    (0.001, 100)
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was seen."""
        self.hop_s = float("inf")
        self._large: list[tuple[int, int, float]] = []

    def note(self, sent_bytes: int, hops: int, seconds: float) -> None:
        """One call: the bytes that the busiest direction of this rank's link carried, and messages in sequence."""
        if hops and sent_bytes <= SMALL_BYTES:
            self.hop_s = min(self.hop_s, seconds / hops)
        elif hops and sent_bytes >= LARGE_BYTES:
            self._large = [*self._large[-15:], (sent_bytes, hops, seconds)]

    @property
    def byte_s(self) -> float:
        """Seconds a byte beyond the hops, the least seen; infinite before a large call."""
        hop = 0.0 if self.hop_s == float("inf") else self.hop_s
        return min((max(took - hops * hop, 0.0) / sent for sent, hops, took in self._large), default=float("inf"))
