"""When a round ends, by rule: what each simulated worker knows, and what it makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from dynamix.model.rounds import steps_apart
from dynamix.window import Floats, Ints
from dynamix_lab.suites.gossip.sketches import MarkArrays, Pairs
from dynamix_lab.suites.gossip.traces import KEPT, MEMORY, SENT, SIZE
from dynamix_lab.suites.gossip.world import GossipWorld

LEAST = 1.0  # length of a round that is worth beginning
GUESS = 8.0  # length of a round of which nothing is known, in pieces of a median worker


class EndRule(Protocol):
    """Says when a round ends.

    whole   workers look whether it is over between two pieces only; else the last piece is cut to fit
    loses   who is behind by a round after a partition takes another's model, and loses its own
    """

    whole: bool
    loses: bool

    def lengths(self, world: GossipWorld, who: Ints, number: int, now: float, meeting: float) -> Floats:
        """Of the round `number` that begins `now` for workers `who` (n,), who have just met for `meeting`."""

    def talk(self, pairs: Pairs, numbers: Iterable[int]) -> None:
        """Workers talk in pairs, while these rounds are under way."""

    def forget(self, who: Ints) -> None:
        """Workers `who` died."""

    def message_bytes(self) -> float:
        """Of a message, in the mean over workers; 0 where nothing is sent."""


class Fixed:
    """A deadline: the same length in every round."""

    whole = loses = False

    def __init__(self, length: float) -> None:
        self.length = length

    def lengths(self, world: GossipWorld, who: Ints, number: int, now: float, meeting: float) -> Floats:
        return np.full(len(who), self.length)

    def talk(self, pairs: Pairs, numbers: Iterable[int]) -> None:
        """Nothing is said."""

    def forget(self, who: Ints) -> None:
        """Nothing was known."""

    def message_bytes(self) -> float:
        return 0.0


def wanted(speeds: Floats, meeting: float) -> float:
    """The product's length of a round of workers with these speeds, in time."""
    piece = 1.0 / float(speeds.mean())
    return steps_apart(meeting, piece) * piece


class SharedClock(Fixed):
    """A deadline by a clock that all share: rounds end at every multiple of the length."""

    def lengths(self, world: GossipWorld, who: Ints, number: int, now: float, meeting: float) -> Floats:
        return np.full(len(who), self.length * np.ceil((now + LEAST) / self.length) - now)


class Oracle(Fixed):
    """A rank 0 that knows all speeds and what the next meeting will take, and says when a round ends."""

    def __init__(self) -> None:
        super().__init__(GUESS)
        self._ends: dict[tuple[int, int], float] = {}

    def lengths(self, world: GossipWorld, who: Ints, number: int, now: float, meeting: float) -> Floats:
        slot = min(world.at(now), len(world.meeting) - 1)
        part = int(world.half[who[0]]) if world.cut[slot] else -1
        if (part, number) not in self._ends:
            here = world.alive[:, slot] & ((part < 0) | (world.half == part))
            self._ends[part, number] = now + wanted(world.speed[here, slot], float(world.meeting[slot]))
        return np.full(len(who), max(self._ends[part, number] - now, LEAST))


class Riding(Fixed):
    """Sums that ride on the meeting: who met shares what each has seen and what each was told before, half and half."""

    NEW = 0.5

    def __init__(self, world: GossipWorld) -> None:
        super().__init__(GUESS)
        self._told = np.full((world.workers, 2), np.nan)  # mean speed and what a meeting takes, as each worker knows it

    def lengths(self, world: GossipWorld, who: Ints, number: int, now: float, meeting: float) -> Floats:
        if not meeting:
            return np.full(len(who), GUESS)
        slot = min(world.at(max(now - meeting, 0.0)), len(world.meeting) - 1)
        seen = np.array([world.speed[who, slot].mean(), meeting])
        known = self._told[who][np.isfinite(self._told[who, 0])]
        self._told[who] = seen if not len(known) else self.NEW * seen + (1 - self.NEW) * known.mean(0)
        speed, took = self._told[who[0]]
        return np.full(len(who), wanted(np.array([speed]), float(took)))

    def forget(self, who: Ints) -> None:
        self._told[who] = np.nan


class Ends(Riding):
    """The same, and workers gossip when a round ends, and nothing else: a number and a time."""

    def message_bytes(self) -> float:
        return 20.0


class Tracker:
    """Hivemind's ProgressTracker (hivemind/optim/progress_tracker.py, 4bd43b7): a round ends when all together have
    `target` pieces for each of the workers at the beginning, as each foresees it from what peers have published.

    Peers publish after every piece, and fetch what others published more often as the end comes near. What it foresees
    counts peers that died as if they went on, until their entry expires after 60 s.
    """

    whole = loses = True
    EXPIRES = 60.0
    ENTRY = 80  # bytes of an entry without its signature and key

    def __init__(self, target: float, world: GossipWorld) -> None:
        self.target, self.workers = target * world.workers, world.workers
        self.died = np.full(world.workers, -np.inf)
        self._now = 0.0
        self._ends: dict[tuple[int, int], float] = {}

    def lengths(self, world: GossipWorld, who: Ints, number: int, now: float, meeting: float) -> Floats:
        self._now = now
        slot = min(world.at(now), len(world.meeting) - 1)
        part = int(world.half[who[0]]) if world.cut[slot] else -1
        if (part, number) not in self._ends:
            counted = world.alive[:, slot] | (self.died > now - self.EXPIRES)
            here = counted & ((part < 0) | (world.half == part))
            self._ends[part, number] = now + self.target / float(world.speed[here, slot].sum())
        return np.full(len(who), max(self._ends[part, number] - now, 0.0))

    def talk(self, pairs: Pairs, numbers: Iterable[int]) -> None:
        """Its table is taken to be the same everywhere."""

    def forget(self, who: Ints) -> None:
        self.died[who] = self._now

    def message_bytes(self) -> float:
        return float(self.ENTRY * self.workers)  # of what is fetched


class Gossiped:
    """Traces by gossip; see `traces`. Every round has marks of its own, of which the newest are passed on."""

    whole = loses = False

    def __init__(self, world: GossipWorld, rng: np.random.Generator, size: int = SIZE) -> None:
        self.size, self._rng = size, rng
        self.marks: dict[int, MarkArrays] = {}
        self._sent = 0.0

    def lengths(self, world: GossipWorld, who: Ints, number: int, now: float, meeting: float) -> Floats:
        slot = min(world.at(max(now - meeting, 0.0)), len(world.meeting) - 1)
        if number not in self.marks:
            self.marks[number] = MarkArrays(self._rng, world.workers, self.size)
            for old in sorted(self.marks)[: -2 * MEMORY]:  # halves of a network may be at unlike rounds
                del self.marks[old]
        left = np.stack([world.speed[who, slot], np.full(len(who), meeting)], 1)
        if number and meeting:
            self.marks[number].leave(who, left)
        count, sums = np.zeros(len(who)), np.zeros((len(who), 2))
        for before, marks in self.marks.items():
            if number - MEMORY < before < number:
                held, summed = marks.sums(who)
                part = KEPT ** (number - 1 - before)
                count, sums = count + part * held, sums + part * summed
        with np.errstate(divide="ignore", invalid="ignore"):
            speed, took = sums[:, 0] / count, sums[:, 1] / count
            piece = 1.0 / speed
            steps = np.clip(8.0 * (took / piece) ** (1 / 3), 1.0, 64.0)
        return np.where(count > 0, steps * piece, GUESS)

    def talk(self, pairs: Pairs, numbers: Iterable[int]) -> None:
        for number in {number - back for number in numbers for back in range(SENT)} & self.marks.keys():
            self.marks[number].talk(pairs)

    def forget(self, who: Ints) -> None:
        for marks in self.marks.values():
            marks.forget(who)

    def message_bytes(self) -> float:
        newest = sorted(self.marks)[-SENT:]
        held = [float((self.marks[number].keys != 0xFFFFFFFF).sum(1).mean()) for number in newest]
        return 12.0 + sum(12.0 + 16.0 * marks for marks in held)  # the round and its end, and the marks
