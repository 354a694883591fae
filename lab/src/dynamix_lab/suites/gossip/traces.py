"""Decaying traces that workers gossip: how long a round should be, without a place where all is known.

In every round each worker leaves its speed and what the last meeting took. Workers that talk to each other join what
they hold, in any order, over links that lose and repeat messages. Of a round the `size` marks with the lowest
priorities are kept (a bottom-k sketch: Cohen and Kaplan, PODC 2007). A priority is a hash of worker and round, so what
is kept is a uniform sample of all workers, and the same one everywhere once word has come round. With `size` workers or
fewer it is everybody. A round's sums count the less, the older it is.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dynamix.errors import StateError
from dynamix.model.rounds import steps_apart

SIZE, MEMORY, SENT, KEPT = 32, 3, 2, 0.25
_HEAD, _MARK = struct.Struct("<HqH"), struct.Struct("<Qff")
_PRIORITIES = 2.0**64

Mark = tuple[int, float, float]
"""Priority, samples a second of one worker while it computes, seconds of the last meeting."""


@dataclass(frozen=True, slots=True)
class CrowdMeans:
    """What traces say of all workers.

    workers     how many there are: exact up to `size`, else within about 1 / sqrt(size)
    speed       samples a second of a worker, in the mean
    meeting_s   of a meeting, in the mean
    """

    workers: float
    speed: float
    meeting_s: float

    def round_seconds(self, piece: float) -> float:
        """Of computing between two meetings, alike for all: `steps_apart` pieces of `piece` samples in the mean.

        Each worker trains what it can in this time, so no share has to be agreed on.

        >>> CrowdMeans(workers=8, speed=64.0, meeting_s=0.5).round_seconds(32)
        4.0
        """
        piece_s = piece / self.speed
        return steps_apart(self.meeting_s, piece_s) * piece_s


def priority(worker: int, number: int) -> int:
    """Of a worker's mark in a round: drawn anew in every round, and known to all."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<qq", worker, number), digest_size=8).digest(), "little")


class GossipedTraces:
    """What one worker holds of all: by round, the marks of lowest priority, sorted.

    size     marks kept of a round
    memory   rounds kept, the newest ones
    kept     part of its weight that a round's sums keep from one round to the next

    `join` is commutative, associative and idempotent, whatever came before.

    >>> mine, other = GossipedTraces(), GossipedTraces()
    >>> mine.leave(0, 1, speed=100.0, meeting_s=1.0)
    >>> other.leave(1, 1, speed=300.0, meeting_s=1.0)
    >>> mine.join(other.message())
    >>> mine.crowd(2)
    CrowdMeans(workers=2.0, speed=200.0, meeting_s=1.0)
    """

    def __init__(self, *, size: int = SIZE, memory: int = MEMORY, kept: float = KEPT) -> None:
        self.size, self.memory, self.kept = size, memory, kept
        self.marks: dict[int, tuple[Mark, ...]] = {}

    def leave(self, worker: int, number: int, *, speed: float, meeting_s: float) -> None:
        """Leave `worker`'s mark in round `number`."""
        one, two = _single(speed), _single(meeting_s)  # as it will travel, or copies would differ
        self._take(number, [(priority(worker, number), one, two)])
        self._forget()

    def join(self, message: bytes) -> None:
        """Take in what another worker's `message` holds. Raises `StateError` for bytes that are none."""
        for number, marks in _read(message).items():
            self._take(number, marks)
        self._forget()

    def message(self, rounds: int = SENT) -> bytes:
        """The newest `rounds` rounds for others: 12 bytes a round and 16 a mark, so one packet."""
        parts = []
        for number in sorted(self.marks)[-rounds:]:
            marks = self.marks[number]
            parts.append(_HEAD.pack(self.size, number, len(marks)))
            parts += [_MARK.pack(*mark) for mark in marks]
        return b"".join(parts)

    def crowd(self, before: int) -> CrowdMeans | None:
        """What marks of rounds before `before` say; None where there are none.

        The round under way is left out: its marks are still on their way.
        """
        weight = speed = meeting_s = heads = rounds = 0.0
        for number, marks in self.marks.items():
            if number < before:
                part = self.kept ** (before - 1 - number)
                weight += part * len(marks)
                speed += part * sum(mark[1] for mark in marks)
                meeting_s += part * sum(mark[2] for mark in marks)
                heads, rounds = heads + part * self._count(marks), rounds + part
        if not weight:
            return None
        return CrowdMeans(heads / rounds, speed / weight, meeting_s / weight)

    def _count(self, marks: tuple[Mark, ...]) -> float:
        if len(marks) < self.size:
            return float(len(marks))
        return (self.size - 1) / ((marks[-1][0] + 1) / _PRIORITIES)

    def _take(self, number: int, marks: Iterable[Mark]) -> None:
        best: dict[int, Mark] = {}
        for mark in (*self.marks.get(number, ()), *marks):
            # A worker that began anew may have left two marks in one round: all keep the same one.
            best[mark[0]] = min(mark, best.get(mark[0], mark))
        self.marks[number] = tuple(sorted(best.values())[: self.size])

    def _forget(self) -> None:
        for number in sorted(self.marks)[: -self.memory]:
            del self.marks[number]


End = tuple[int, float]
"""Of a round: its number, and when it ends."""


def later(one: End, two: End) -> End:
    """What holds of two announced ends: that of the later round, and of one round the sooner.

    It makes a register that any number of workers may join in any order. A worker ends the round that it is in when the
    register says so, goes over to a round that is two ahead, and leaves one alone that is one ahead: others have met a
    moment before.

    >>> later((3, 9.0), (3, 8.5)), later((3, 9.0), (5, 20.0))
    ((3, 8.5), (5, 20.0))
    """
    return max(one, two, key=lambda end: (end[0], -end[1]))


def _single(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _read(message: bytes) -> Mapping[int, list[Mark]]:
    found: dict[int, list[Mark]] = {}
    at = 0
    try:
        while at < len(message):
            _, number, count = _HEAD.unpack_from(message, at)
            at += _HEAD.size
            found[number] = [_MARK.unpack_from(message, at + i * _MARK.size) for i in range(count)]
            at += count * _MARK.size
    except struct.error as error:
        raise StateError(f"a message of {len(message)} bytes holds no traces: {error}") from error
    return found
