"""Which way a bucket takes: measured, agreed over ranks, measured again when links or gradients change.

Pure bookkeeping: everything decided here follows from numbers that all ranks share, so all decide alike. Trying a way
that loses costs time; the loss over dense is kept within a budget, as a fraction of what dense alone would have taken.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from dynamix.compression.bucket import Way
from dynamix.errors import ConfigError

CANDIDATES: tuple[Way, ...] = ("compaction", "lhc")
AGREE_EVERY = 32  # steps between agreements; one small collective each, and one dense step
MEASURE_EVERY = 16  # a settled dense bucket is timed at one step in this many
REFRESH = 16  # agreements after which the ways not taken count as unknown again
GAIN = 0.95  # a way must take less than this share of dense's time to be picked
DRIFT = 1.3  # a time that changed by more than this factor, twice running, means that links have changed
HOPELESS = 0.55  # share of nonzero elements on one rank above which no way can send much less than dense
SPARSE = 0.2  # and below which one try is made at once


class Chooser:
    """One bucket's choice.

    Per step: `next()`, run it, `record(seconds)`; where `due` was set beforehand, reduce `report(density)` over ranks
    by minimum (the last rank to arrive waits for nobody) and hand the result to `agree`.
    """

    def __init__(self, candidates: Sequence[Way] = CANDIDATES, *, budget: float = 0.02) -> None:
        if not 0 < budget <= 1:
            raise ConfigError("budget", budget, "above 0, up to 1", "0.02 spends at most 2 % of dense's time on trying")
        self.candidates, self.budget = tuple(candidates), budget
        self.way: Way = "dense"
        self.cost_s: dict[Way, float] = {}
        self._plan: deque[Way] = deque(["dense"] * 4)
        self._trying = True
        self._log: list[tuple[Way, float]] = []
        self._steps = 0  # since the last agreement
        self._unknown: set[Way] = set(candidates)
        self._anchor_s = 0.0  # the picked way's time when it was picked
        self._drifts = self._quiet = 0
        self._spent_s = self._dense_s = 0.0
        self._density = 1.0

    def next(self) -> tuple[Way, bool]:
        """The way for this step, and whether it must be timed."""
        if self._plan:
            return self._plan[0], True
        if self.way != "dense" and self._steps == 0:
            return "dense", True  # so that both are known under the same load
        return self.way, self.way != "dense" or self.due or self._steps % MEASURE_EVERY == 0

    @property
    def due(self) -> bool:
        """Whether ranks agree after this step."""
        return len(self._plan) == 1 if self._trying else self._steps + 1 >= AGREE_EVERY

    def record(self, seconds: float | None = None) -> None:
        """This step's time on this rank; None when it was not timed."""
        way, _ = self.next()
        if self._plan:
            self._plan.popleft()
        if seconds is not None:
            self._log.append((way, seconds))
        self._steps += 1

    def report(self, density: float) -> list[float]:
        """This rank's numbers since the last agreement; `density` is its share of elements that are not zero."""
        return [-density, *(seconds for _, seconds in self._log)]

    def agree(self, least: Sequence[float]) -> None:
        """The element-wise minimum of all ranks' reports."""
        self._density = -least[0]
        times: dict[Way, list[float]] = {}
        for (way, _), seconds in zip(self._log, least[1:], strict=True):
            times.setdefault(way, []).append(seconds)
        # The first of several trials pays for cold caches and, once, for compiling kernels.
        fresh = {way: median(t[1:] if self._trying and len(t) > 1 else t) for way, t in times.items()}
        dense = fresh.get("dense", self.cost_s.get("dense", 0.0))
        self._spent_s += sum(sum(t) - dense * len(t) for way, t in times.items() if way != "dense")
        self._dense_s += dense * self._steps
        self._log, self._steps = [], 0
        if self._trying:
            self._after_trial(fresh)
        else:
            self._watch(fresh)

    def _after_trial(self, fresh: dict[Way, float]) -> None:
        self.cost_s.update(fresh)
        for way in self.candidates:
            if way in fresh and way in self._unknown:
                self._unknown.discard(way)
                if fresh[way] < 1.5 * self.cost_s["dense"]:
                    self._start([way] * 3)  # near enough for a proper measurement
                    return
        if not self._try_another():
            self._pick()

    def _try_another(self) -> bool:
        way = next((way for way in self.candidates if way in self._unknown and self._worth_trying(way)), None)
        if way is not None:
            self._start([way])
        return way is not None

    def _worth_trying(self, way: Way) -> bool:
        dense = self.cost_s["dense"]
        if self._density > HOPELESS:
            return False
        if way == "lhc" and "compaction" in self.candidates and self.cost_s.get("compaction", dense) >= dense:
            return False  # it sends more and computes more
        if way not in self.cost_s and self._density <= SPARSE and way != "lhc":
            return True
        guess = self.cost_s.get(way, 2 * self.cost_s.get("compaction", dense))
        return self._spent_s + max(guess - dense, 0.0) <= self.budget * self._dense_s

    def _pick(self) -> None:
        known = [way for way in self.candidates if way in self.cost_s]
        best: Way = min(known, key=lambda way: self.cost_s[way]) if known else "dense"
        self.way = best if self.cost_s[best] < GAIN * self.cost_s["dense"] else "dense"
        self._anchor_s, self._drifts, self._quiet = self.cost_s[self.way], 0, 0
        self._trying = False

    def _watch(self, fresh: dict[Way, float]) -> None:
        now = fresh[self.way]
        far = not self._anchor_s / DRIFT <= now <= self._anchor_s * DRIFT
        self._drifts = self._drifts + 1 if far else 0
        self._quiet += 1
        self.cost_s[self.way] = now
        if self.way != "dense":
            self.cost_s["dense"] = (self.cost_s["dense"] + fresh["dense"]) / 2  # one step is a noisy measurement
        losing = self.way != "dense" and now > self.cost_s["dense"]
        if self._drifts >= 2 or losing:
            self._unknown = set(self.candidates) - {self.way}
            self._drifts, self._anchor_s = 0, now
            if self.way != "dense":
                self._start(["dense"] * 3)
                return
        elif self._quiet >= REFRESH:
            self._unknown, self._quiet = set(self.candidates) - {self.way}, 0
        self._try_another()

    def _start(self, plan: list[Way]) -> None:
        self._plan, self._trying = deque(plan), True
