"""Plays a rule in a simulated world: rounds, meetings of who can be reached, and what of the workers' time was of use.

A meeting begins when all who can be reached are there, or `PATIENCE` after the first one is: somebody who died is not
waited for longer. Who comes late trains on and meets with the others the next time. Who is called to a meeting learns
when the next round ends. Where not all meet, workers of a round are dealt into groups of `GROUP`, anew in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynamix.window import Floats, Ints
from dynamix_lab.suites.gossip.rules import LEAST, EndRule
from dynamix_lab.suites.gossip.sketches import paired
from dynamix_lab.suites.gossip.world import TROUBLE, GossipWorld

TICK = 1.5  # time between two exchanges of gossip
PATIENCE = 1.0
SCATTER = 0.2  # standard deviation of the log of what a meeting takes
JITTER = 0.05  # of a piece, when the last one ends
STEPS = (2, 4, 8, 16, 32, 64)
# Samples to a loss at so many steps between meetings, over those at 2: the mean over the jobs with alike data of
# results/how-often-2026-11-24 (a test makes them anew).
NEEDED = (1.0, 1.038, 1.172, 1.371, 1.805, 2.132)
LEVEL = 0.02  # lengths of rounds that are no further apart are the same


def worth_of(steps: float) -> float:
    """What a sample teaches in rounds of so many steps in the mean over workers, over what it does in short ones.

    >>> worth_of(2.0), round(worth_of(16.0), 3)
    (1.0, 0.729)
    """
    return float(1.0 / np.exp(np.interp(np.log(max(steps, 1.0)), np.log(STEPS), np.log(NEEDED))))


@dataclass
class Meeting:
    """What came of one: when, who was there of how many, their pieces, how far apart their lengths of a round were."""

    time: float
    met: int
    alive: int
    pieces: float
    worth: float
    apart: float
    waited: float


@dataclass
class Play:
    """A rule's way through a world."""

    world: GossipWorld
    rule: EndRule
    rng: np.random.Generator
    gossips: bool = False
    size: int | None = None  # of a group that meets; None: all do
    meetings: list[Meeting] = field(default_factory=list)
    messages: int = 0
    bytes: float = 0.0

    def run(self) -> dict[str, Any]:
        """To the world's end; see `summary`."""
        world, size = self.world, self.world.workers
        self.begin = np.full(size, np.nan)  # when a worker began to train what it has not brought to a meeting yet
        self.ends, self.number = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
        self.taken, self.length = np.zeros(size), np.full(size, np.nan)  # worked and lengths, at the round's beginning
        self.apart_since = np.zeros(size)  # pieces that only half of the network has
        self.carried = np.zeros(size)  # trained before a meeting to which nobody else came
        self.died, self.cells = np.full(size, -np.inf), dict[int, Ints]()
        self.announced, self.announced_end = np.zeros(size, dtype=np.int64), np.full(size, np.inf)
        alive = world.alive[:, 0].copy()
        self._start(np.flatnonzero(alive), 0.0, 0.0)
        time, was_cut = 0.0, False
        while time < world.end - TICK:
            time += TICK
            slot = world.at(time)
            now, cut = world.alive[:, slot], bool(world.cut[slot])
            died = np.flatnonzero(alive & ~now)
            if died.size:
                self.died[died], self.begin[died], self.carried[died] = time, np.nan, 0.0
                self.announced[died], self.announced_end[died] = 0, np.inf
                self.rule.forget(died)
            alive = now
            if was_cut and not cut:
                self._heal(np.flatnonzero(alive))
            was_cut = cut
            for part in (0, 1) if cut else (None,):
                reached = np.ones(size, dtype=bool) if part is None else world.half == part
                here = np.flatnonzero(alive & reached)
                if here.size:
                    self._tick(here, np.flatnonzero(reached), time, cut=cut)
        return self.summary()

    def _tick(self, here: Ints, reached: Ints, time: float, *, cut: bool) -> None:
        """Workers `here` live, of those that could be `reached`."""
        training = here[np.isfinite(self.begin[here])]
        if not training.size:
            self._start(here, time, 0.0)
            return
        if self.gossips:
            self._gossip(here)
        coming = here[np.isnan(self.begin[here])]
        self.number[coming] = int(np.median(self.number[training]))
        ready, groups = self._ready(training), self._groups(training)
        names, index = np.unique(groups, return_inverse=True)
        first, last, begun = (np.full(len(names), start) for start in (np.inf, -np.inf, np.inf))
        np.minimum.at(first, index, ready)
        np.maximum.at(last, index, ready)
        np.minimum.at(begun, index, self.begin[training])
        gone = np.full(len(names), -np.inf)
        dead = reached[self.died[reached] > begun.min()]
        place = np.minimum(np.searchsorted(names, self._groups(dead)), len(names) - 1)
        ours = names[place] == self._groups(dead)
        np.maximum.at(gone, place[ours], self.died[dead[ours]])
        begins = np.where(gone > begun, first + PATIENCE, np.minimum(last, first + PATIENCE))
        for group in np.flatnonzero(begins <= time):
            of_it = index == group
            joins = coming[self._groups(coming) == names[group]]
            self._meet(training[of_it], ready[of_it], float(begins[group]), joins, cut=cut)

    def _groups(self, who: Ints) -> Ints:
        """Which meeting each worker is going to: where all meet, one for all whatever their round's number."""
        if self.size is None:
            return np.zeros(len(who), dtype=np.int64)
        numbers, found = self.number[who], np.empty(len(who), dtype=np.int64)
        for number in np.unique(numbers).tolist():
            if number not in self.cells:
                dealt = np.random.default_rng([self.world.workers, number]).permutation(self.world.workers)
                self.cells[number] = np.argsort(dealt) // self.size
            of_it = numbers == number
            found[of_it] = self.cells[number][who[of_it]] + self.world.workers * number
        return found

    def _gossip(self, here: Ints) -> None:
        pairs = paired(self.rng, here)
        self.rule.talk(pairs, np.unique(self.number[here]).tolist())
        one, two = pairs.asking, pairs.asked
        # `traces.later` of both, for all pairs at once
        first = (self.announced[one] > self.announced[two]) | (
            (self.announced[one] == self.announced[two]) & (self.announced_end[one] < self.announced_end[two])
        )
        number = np.where(first, self.announced[one], self.announced[two])
        end = np.where(first, self.announced_end[one], self.announced_end[two])
        for who, heard in ((two, pairs.heard), (one, pairs.answered)):
            self.announced[who] = np.where(heard, number, self.announced[who])
            self.announced_end[who] = np.where(heard, end, self.announced_end[who])
        self._follow(here)
        self.messages += int(len(one) + pairs.heard.sum())
        self.bytes += float(len(one) + pairs.heard.sum()) * self.rule.message_bytes()

    def _follow(self, who: Ints) -> None:
        """Rounds end when the register says so, and one that is two ahead is gone over to."""
        number, end = self.announced[who], self.announced_end[who]
        same, ahead = number == self.number[who], number >= self.number[who] + 2
        self.ends[who] = np.where(same, np.minimum(self.ends[who], end), np.where(ahead, end, self.ends[who]))
        self.number[who] = np.where(ahead, number, self.number[who])

    def _ready(self, who: Ints) -> Floats:
        """When each worker is done with its last piece."""
        begin, ends = self.begin[who], self.ends[who]
        slot = np.minimum((ends // 5.0).astype(np.int64), len(self.world.meeting) - 1)
        piece = 1.0 / self.world.speed[who, slot]
        if self.rule.whole:
            return np.asarray(begin + np.maximum(np.ceil((ends - begin) / piece), 1.0) * piece)
        noise = np.abs(np.sin(1e3 * (ends + who)))  # alike for all rules that end at one time
        return np.asarray(ends + JITTER * piece * noise)

    def _meet(self, training: Ints, ready: Floats, begins: float, coming: Ints, *, cut: bool) -> None:
        """Who of `training` is `ready` in time meets; who is `coming` anew begins with them."""
        world = self.world
        in_time = ready <= begins
        met, late = training[in_time], training[~in_time]
        slot = min(world.at(begins), len(world.meeting) - 1)
        scatter = np.random.default_rng([self.world.workers, int(met[0]), int(self.number[met[0]])]).standard_normal()
        takes = float(world.meeting[slot] * np.exp(SCATTER * scatter))
        worked = world.pieces(met, ready[in_time]) - self.taken[met] + self.carried[met]
        self.carried[met] = worked if len(met) == 1 else 0.0
        self.apart_since[met] += worked if cut else 0.0
        lengths = self.length[training]
        apart = float(lengths.std() / max(lengths.mean(), LEAST))
        waited, worth = float((begins - ready[in_time]).mean()), worth_of(float(worked.mean()))
        there = len(training) + len(coming)
        brought = float(worked.sum()) if len(met) > 1 else 0.0
        self.meetings.append(Meeting(begins, len(met), there, brought, worth, apart, waited))
        self._start(np.concatenate([met, coming]), begins + takes, takes, late=late)

    def _start(self, who: Ints, now: float, took: float, *, late: Ints | None = None) -> None:
        """Workers `who` begin a round; those who are late go on with theirs, and end with them."""
        number = int(self.number[who].max(initial=0)) + (1 if took else 0)
        self.length[who] = self.rule.lengths(self.world, who, number, now, took)
        self.begin[who], self.number[who] = now, number
        self.ends[who] = now + self.length[who]
        self.taken[who] = self.world.pieces(who, np.full(len(who), now))
        if late is not None and late.size:
            self.ends[late], self.number[late] = float(np.median(self.ends[who])), number
            self.length[late] = float(np.median(self.length[who]))
        if self.gossips:
            sooner = (self.announced[who] < number) | (self.ends[who] < self.announced_end[who])
            mine = sooner & (self.announced[who] <= number)
            self.announced_end[who] = np.where(mine, self.ends[who], self.announced_end[who])
            self.announced[who] = np.where(mine, number, self.announced[who])
            self._follow(who)

    def _heal(self, who: Ints) -> None:
        """The network is whole again. A rule that `loses` drops what the half that is behind has trained apart."""
        if self.rule.loses:
            behind = who[self.number[who] < self.number[who].max() - 1]
            if behind.size:
                dropped = float(self.apart_since[behind].sum())
                self.meetings.append(Meeting(TROUBLE[1], 0, len(who), -dropped, 1.0, 0.0, 0.0))
                self.number[behind] = self.number[who].max()
        self.apart_since[:] = 0.0

    def summary(self) -> dict[str, Any]:
        """What the play was worth.

        useful    pieces that came to a meeting, in parts of what workers could have trained without ever waiting
        pace      the same, a piece counting for what it teaches in a round of so many steps
        apart     how far workers' lengths of a round were apart, in the mean
        settled   meetings after a partition until nearly all met and lengths were level again; None without one
        """
        capacity, meetings = self.world.capacity(), self.meetings
        real = [meeting for meeting in meetings if meeting.met]
        living = float(self.world.alive.sum(0).mean())
        rounds = sum(meeting.met for meeting in real) / living  # of a worker
        return {
            "useful": sum(m.pieces for m in meetings) / capacity,
            "pace": sum(m.pieces * m.worth for m in meetings) / capacity,
            "apart": float(np.mean([m.apart for m in real])),
            "waited": float(np.mean([m.waited for m in real])),
            "rounds": rounds,
            "settled": self._settled(real) if self.world.cut.any() else None,
            "messages": self.messages / max(living * rounds, 1.0),
            "bytes": self.bytes / max(living * rounds, 1.0),
        }

    def _settled(self, real: list[Meeting]) -> int | None:
        after = [m for m in real if m.time >= TROUBLE[1]]
        for count, meeting in enumerate(after, 1):
            if meeting.met >= 0.95 * meeting.alive and meeting.apart <= LEVEL:
                return count
        return None
