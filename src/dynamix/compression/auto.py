"""Which way a bucket takes: predicted from bytes and hops, measured, agreed over ranks, and looked at again.

Pure bookkeeping: everything decided here follows from numbers that all ranks share, so all decide alike. A way is tried
only if the model of `traffic` allows it to win at the link's measured speed, computing taken as free; so a bucket that
is mostly zero never pays for a dense step on a slow link to learn that it is slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from dynamix.compression.spread import Spread
from dynamix.compression.traffic import traffic
from dynamix.compression.ways import registry
from dynamix.errors import ConfigError

AGREE_EVERY = 32  # steps between agreements; one small collective each
MEASURE_EVERY = 16  # a settled dense bucket is timed at one step in this many
REFRESH = 16  # agreements after which the ways not taken count as unknown again
DROP = 0.8  # a bucket of which less than this share is left of what was not zero when it was full is asked again
GAIN = 0.97  # a way must take less than this share of the present one's time to replace it
DRIFT = 1.3  # a time that changed by more than this factor, twice running, means that links have changed
NEAR = 1.5  # a first trial within this factor of the best is followed by a proper measurement
UNKNOWN_S = 1e9  # in a report, for a link speed that this rank has not seen


class Chooser:
    """One bucket's choice.

    Per step: `next()`, run it, `record(seconds)`; where `due` was set beforehand, reduce `report(...)` over ranks by
    minimum (the last rank to arrive waits for nobody) and hand the result and what all ranks know of the bucket's
    nonzeros to `agree`. If some way found it `full`, the report says which share of the mean is not zero.

    candidates   ways beside "dense", of the registry; None: its candidates over a process group
    budget       share of the time spent that trying other ways may cost, beyond one try each of those that may win
    """

    def __init__(self, candidates: Sequence[str] | None = None, *, budget: float = 0.02) -> None:
        if not 0 < budget <= 1:
            raise ConfigError("budget", budget, "above 0, up to 1", "0.02 spends at most 2 % of the time on trying")
        candidates = registry().candidates if candidates is None else candidates
        self.candidates, self.budget = tuple(candidates), budget
        self.way = "dense"
        self.cost_s: dict[str, float] = {}
        first = candidates[0] if candidates else "dense"
        self._plan: deque[str] = deque([first, first])  # its header tells what all others would send
        self._trying = True
        self._log: list[tuple[str, float]] = []
        self._full: list[str] = []  # of these, those that found too little to leave out and went dense
        self._steps = 0  # since the last agreement
        self._filled, self._dropped = 1.0, False  # what was not zero when a way found it full; much less is now
        self._unknown = {*candidates, "dense"}
        self._anchor_s = 0.0  # the picked way's time when it was picked
        self._drifts = self._quiet = 0
        self._spent_s = self._total_s = 0.0
        self._hop_s = self._byte_s = 0.0
        self._spread: Spread | None = None
        self._forgotten: Spread | None = None  # too old to foresee with; whoever sends densely sees no other

    def next(self) -> tuple[str, bool]:
        """The way for this step, and whether it must be timed."""
        if self._plan:
            return self._plan[0], True
        return self.way, self.way != "dense" or self.due or self._steps % MEASURE_EVERY == 0

    @property
    def due(self) -> bool:
        """Whether ranks agree after this step."""
        return len(self._plan) == 1 if self._trying else self._steps + 1 >= AGREE_EVERY

    @property
    def full(self) -> bool:
        """Whether some way is not taken as it found too little to leave out."""
        return bool(self._full) or math.inf in self.cost_s.values()

    def record(self, seconds: float | None = None, *, full: bool = False) -> None:
        """This step's time on this rank; None when it was not timed.

        full   the way found, on every rank, that dense would send less, and went dense: it is none to take
        """
        way, _ = self.next()
        if self._plan:
            self._plan.popleft()
        if seconds is not None:
            self._log.append((way, seconds))
            self._full += [way] * full
        self._steps += 1

    def report(self, *, hop_s: float = math.inf, byte_s: float = math.inf, filled: float = 1.0) -> list[float]:
        """This rank's numbers since the last agreement: how fast it found its link (infinite: not seen), and times.

        filled   the share of the mean that is not zero
        """
        speed = [min(hop_s, UNKNOWN_S), min(byte_s, UNKNOWN_S)]
        return [*speed, filled, *(seconds for _, seconds in self._log)]

    def agree(self, least: Sequence[float], spread: Spread | None = None) -> None:
        """The element-wise minimum of all ranks' reports; `spread`, the same on all ranks, replaces the last one."""
        self._hop_s, self._byte_s = (0.0 if x >= UNKNOWN_S else x for x in least[:2])
        if spread is not self._forgotten:
            self._spread = spread or self._spread
        times: dict[str, list[float]] = {}
        for (way, _), seconds in zip(self._log, least[3:], strict=True):
            times.setdefault(way, []).append(seconds)
        # The first of several trials pays for cold caches.
        fresh = {way: median(t[1:] if self._trying and len(t) > 1 else t) for way, t in times.items()}
        known = {**self.cost_s, **fresh}
        never = {way for way in times if 2 * self._full.count(way) > len(times[way])}
        self._filled = least[2] if never else self._filled
        self._dropped = least[2] < DROP * self._filled
        best = min(known.values(), default=0.0)
        self._spent_s += sum(max(fresh[way] - best, 0.0) * len(t) for way, t in times.items() if way != self.way)
        self._total_s += sum(sum(t) for t in times.values())
        if untimed := self._steps - len(self._log):
            self._total_s += known.get(self.way, best) * untimed
        self._log, self._full, self._steps = [], [], 0
        fresh |= dict.fromkeys(never, math.inf)
        if self._trying:
            self._after_trial(fresh)
        else:
            self._watch(fresh)

    def restrict(self, candidates: Sequence[str]) -> None:
        """Other ways are there from now on, on all ranks alike: an aggregator was lost, or is back.

        A way that is no longer there is followed by the same way without an aggregator.
        """
        gone, came = set(self.candidates) - set(candidates), set(candidates) - set(self.candidates)
        self.candidates = tuple(candidates)
        self.cost_s = {way: cost for way, cost in self.cost_s.items() if way not in gone}
        self._unknown = (self._unknown - gone) | came
        self._log, self._full, self._steps = [], [], 0
        if self.way in gone:
            self.way = self.way.partition("-")[2]
        if self.way not in (*candidates, "dense"):
            self.way = "dense"
        self._start([self.way, self.way])  # timed anew, and then whatever is unknown

    def _after_trial(self, fresh: Mapping[str, float]) -> None:
        self.cost_s.update(fresh)
        best = min(self.cost_s.values())
        for way, cost in fresh.items():
            if way in self._unknown:
                self._unknown.discard(way)
                if cost < NEAR * best and len(self.cost_s) > 1:
                    self._start([way] * 3)  # near enough for a proper measurement
                    return
        if not self._try_another():
            self._pick()

    def _try_another(self) -> bool:
        found = [way for way in (*self.candidates, "dense") if way in self._unknown and self._may_win(way)]
        if not found:
            return False
        self._start([min(found, key=self._promise)])
        return True

    def _promise(self, way: str) -> float:
        """The least time that `way` can take at the link's speed."""
        if self._spread is None:
            return 0.0
        return traffic(way, self._spread).seconds(byte_s=self._byte_s, hop_s=self._hop_s)

    def _may_win(self, way: str) -> bool:
        if not self.cost_s:
            return True
        best = min(self.cost_s.values())
        if self._promise(way) >= GAIN * best:
            return False
        if self.cost_s.get(registry().of(way).beyond or "", 0.0) > best:
            return False  # it sends more and computes more than what has lost already
        if way not in self.cost_s:
            return True  # once
        return self._spent_s + max(self.cost_s[way] - best, 0.0) <= self.budget * self._total_s

    def _pick(self) -> None:
        best = min(self.cost_s, key=lambda way: self.cost_s[way])
        dense = self.cost_s.get("dense", math.inf)
        self.way = best if self.cost_s[best] < GAIN * dense else "dense"
        self._anchor_s, self._drifts, self._quiet = self.cost_s[self.way], 0, 0
        self._trying = False

    def _watch(self, fresh: Mapping[str, float]) -> None:
        now = fresh[self.way]
        far = not self._anchor_s / DRIFT <= now <= self._anchor_s * DRIFT
        self._drifts = self._drifts + 1 if far else 0
        self._quiet += 1
        self.cost_s[self.way] = now
        overtaken = any(cost < GAIN * now for way, cost in self.cost_s.items() if way != self.way)
        if self._drifts >= 2:
            self.cost_s = {self.way: now}  # what was known of other ways was known of another link
            self._drifts, self._anchor_s = 0, now
        if self._quiet >= REFRESH or self._dropped:
            self._forget()
        if self._drifts >= 2 or overtaken or self._quiet == 0 or len(self.cost_s) == 1:
            self._unknown = {*self.candidates, "dense"} - {self.way}
        self._try_another()

    def _forget(self) -> None:
        """Measurements of ways that were not taken for long may be wrong: also that one found too little to leave out,
        and how much of the bucket is zero.
        """
        self._quiet, self._filled = 0, 0.0
        self.cost_s = {way: cost for way, cost in self.cost_s.items() if cost < math.inf or way == self.way}
        if self.way == "dense":
            self._forgotten, self._spread = self._spread, None

    def _start(self, plan: list[str]) -> None:
        self._plan, self._trying = deque(plan), True
