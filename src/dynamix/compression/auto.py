"""Chooses the way of a bucket: predicted from bytes and hops, measured, agreed over ranks, and checked again later.

Pure bookkeeping: every decision follows from numbers that all ranks share, so all decide alike. A way is tried only if
the model of `traffic` lets it win at the link's measured speed, with computing counted as free. So a bucket that is
mostly zero never takes a dense step on a slow link just to measure that it is slow.
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
MEASURE_EVERY = 16  # once the choice is settled, a dense bucket is timed at one step in this many
REFRESH = 16  # agreements after which the costs of unused ways count as unknown again
DROP = 0.8  # a bucket is tried again once its nonzero part is below this share of what it was when it was full
GAIN = 0.97  # a way must take less than this share of the current one's time to replace it
DRIFT = 1.3  # if a time changes by more than this factor twice in a row, links have changed
NEAR = 1.5  # a first trial within this factor of the best is followed by a proper measurement
UNKNOWN_S = 1e9  # in a report, for a link speed that this rank has not seen


class Chooser:
    """One bucket's choice.

    Per step: `next()`, run it, `record(seconds)`. If `due` was set before, reduce `report(...)` over ranks by minimum
    (the last rank to arrive does not wait), and pass the result to `agree`, with the nonzeros that all ranks have seen
    in the bucket. If some way found it `full`, the report includes the nonzero share of the mean.

    candidates   ways besides "dense", of the registry; None: its candidates over a process group
    budget       share of the time that trials of other ways may cost, beyond one trial of each that may win
    """

    def __init__(self, candidates: Sequence[str] | None = None, *, budget: float = 0.02) -> None:
        if not 0 < budget <= 1:
            raise ConfigError("budget", budget, "above 0, up to 1", "0.02 spends at most 2 % of the time on trying")
        candidates = registry().candidates if candidates is None else candidates
        self.candidates, self.budget = tuple(candidates), budget
        self.way = "dense"
        self.cost_s: dict[str, float] = {}
        first = candidates[0] if candidates else "dense"
        self._plan: deque[str] = deque([first, first])  # its header shows what all other ways would send
        self._trying = True
        self._log: list[tuple[str, float]] = []
        self._full: list[str] = []  # those in `_log` that found the bucket too full and went dense
        self._steps = 0  # since the last agreement
        self._filled, self._dropped = 1.0, False  # nonzero share when a way found it full; whether it is much less now
        self._unknown = {*candidates, "dense"}
        self._anchor_s = 0.0  # the chosen way's time when it was chosen
        self._drifts = self._quiet = 0
        self._spent_s = self._total_s = 0.0
        self._hop_s = self._byte_s = 0.0
        self._spread: Spread | None = None
        self._forgotten: Spread | None = None  # too old for predictions; dense exchanges show no newer one

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
        """Whether some way is excluded because it found too few zeros."""
        return bool(self._full) or math.inf in self.cost_s.values()

    def record(self, seconds: float | None = None, *, full: bool = False) -> None:
        """Record this step's time on this rank; None if it was not timed.

        full   the way found, on every rank, that dense would send less, and went dense: do not choose it
        """
        way, _ = self.next()
        if self._plan:
            self._plan.popleft()
        if seconds is not None:
            self._log.append((way, seconds))
            self._full += [way] * full
        self._steps += 1

    def report(self, *, hop_s: float = math.inf, byte_s: float = math.inf, filled: float = 1.0) -> list[float]:
        """This rank's numbers since the last agreement: its link's speed (infinite: not measured), and times.

        filled   the nonzero share of the mean
        """
        speed = [min(hop_s, UNKNOWN_S), min(byte_s, UNKNOWN_S)]
        return [*speed, filled, *(seconds for _, seconds in self._log)]

    def agree(self, least: Sequence[float], spread: Spread | None = None) -> None:
        """Take in the element-wise minimum of all reports; `spread`, the same on all ranks, replaces the last one."""
        self._hop_s, self._byte_s = (0.0 if x >= UNKNOWN_S else x for x in least[:2])
        if spread is not self._forgotten:
            self._spread = spread or self._spread
        times: dict[str, list[float]] = {}
        for (way, _), seconds in zip(self._log, least[3:], strict=True):
            times.setdefault(way, []).append(seconds)
        # The first of several trials has cold caches.
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
        """From now on there are other ways, on all ranks: an aggregator was lost, or is back.

        If the current way is gone, the same way without an aggregator replaces it.
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
        self._start([self.way, self.way])  # measured again, and then the unknown ones

    def _after_trial(self, fresh: Mapping[str, float]) -> None:
        self.cost_s.update(fresh)
        best = min(self.cost_s.values())
        for way, cost in fresh.items():
            if way in self._unknown:
                self._unknown.discard(way)
                if cost < NEAR * best and len(self.cost_s) > 1:
                    self._start([way] * 3)  # near enough to deserve a proper measurement
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
        """The least time of `way` at the link's speed."""
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
            return False  # it sends more and computes more than a way that has lost already
        if way not in self.cost_s:
            return True  # try it once
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
            self.cost_s = {self.way: now}  # other ways were measured on the link as it was before
            self._drifts, self._anchor_s = 0, now
        if self._quiet >= REFRESH or self._dropped:
            self._forget()
        if self._drifts >= 2 or overtaken or self._quiet == 0 or len(self.cost_s) == 1:
            self._unknown = {*self.candidates, "dense"} - {self.way}
        self._try_another()

    def _forget(self) -> None:
        """Drop old measurements of unused ways, which may be wrong by now. This includes that a way found too few
        zeros, and the nonzero share of the bucket.
        """
        self._quiet, self._filled = 0, 0.0
        self.cost_s = {way: cost for way, cost in self.cost_s.items() if cost < math.inf or way == self.way}
        if self.way == "dense":
            self._forgotten, self._spread = self._spread, None

    def _start(self, plan: list[str]) -> None:
        self._plan, self._trying = deque(plan), True
