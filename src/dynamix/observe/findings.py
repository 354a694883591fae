"""Finds the rank that delays the job, in which part, and who waits: figures of the joined steps, without a model."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynamix.observe.joined import Joined
from dynamix.window import Floats

LEAST_EXCESS = 0.05  # part of a step's time above which a rank counts as slow
HOLDS_BACK = 0.2  # part of a step's time above which a slow rank holds the job back; below it is somewhat slower
LEAST_TRANSFER = 0.10  # part of a step's time above which the network counts as slow
STEADY = 0.8  # part of the steps above which a slow rank counts as steadily slow
SLOW_LINK = 3.0  # times the round trips of the others
LEAST_CARRIED = 0.1  # part of the bytes of the busiest connection
ALIKE = 1.5  # if forward and backward are slower by factors closer than this, the cause is computing
SHOWN = ("forward", "backward", "data", "update", "between")


@dataclass(frozen=True)
class Slow:
    """A rank whose steps take longer than those of the others.

    part       "forward", "backward", "computing" (both alike), "data", "update" or "between"
    busy_s     of its step, without waiting; `others_s` the median of the others
    late       part of the steps in which it arrived last
    often      part of the steps in which it was slow
    excess_s   by part, its seconds above the median of the others; medians over the steps in which it was slowest
    """

    rank: int
    part: str
    busy_s: float
    others_s: float
    late: float
    often: float
    excess_s: dict[str, float]

    @property
    def steady(self) -> bool:
        """Whether it was slow nearly all the time; otherwise its slowness came and went."""
        return self.often >= STEADY


@dataclass(frozen=True)
class Findings:
    """The findings about an observed job. Seconds a step, means over the kept steps; arrays are by present rank.

    verdict    "rank" (one is slow), "network" (the exchange takes long), "changing" (the slowest rank changes), "even"
    parts      seconds by part: `SHOWN`
    slow_link  ranks at the slow connection's ends, or the one rank that all slow ones share; empty if none is found
    """

    verdict: str
    step_s: float
    busy_s: Floats
    wait_s: Floats
    transfer_s: float
    parts: dict[str, Floats]
    slow: Slow | None
    slow_link: list[int] = field(default_factory=list)
    link_ratio: float = float("nan")

    @property
    def rank(self) -> int | None:
        """The rank that the verdict names, if any."""
        if self.verdict == "rank" and self.slow is not None:
            return self.slow.rank
        return self.slow_link[0] if self.verdict == "network" and len(self.slow_link) == 1 else None

    @property
    def part(self) -> str | None:
        """The part that the verdict names: a part, "network", or None."""
        if self.verdict == "rank" and self.slow is not None:
            return self.slow.part
        return "network" if self.verdict == "network" else None


def find(job: Joined) -> Findings:
    """The findings of a job with at least one kept step."""
    at = job.kept
    busy, exchange = job.busy[at], job.part("exchange")[at]
    loader = np.nan_to_num(job.part("loader")[at])
    series = {name: job.part(name)[at] for name in ("forward", "backward", "update")}
    series |= {"data": loader, "between": job.part("between")[at] - loader}
    parts = {name: np.nanmean(series[name], 0) for name in SHOWN}
    wait_s, transfer = job.waits
    mean_busy = np.nanmean(busy, 0)
    step_s = float(np.nanmean(np.nansum([busy, exchange], 0)))
    slow, changing = _slow(job.ranks, series, busy, step_s)
    lost, moved = float(np.nanmean(wait_s)), float(transfer[0])
    verdict = "rank" if slow is not None else "changing" if changing else "even"
    if moved > LEAST_TRANSFER * step_s and (verdict == "even" or moved > lost):
        verdict = "network"
    return Findings(verdict, step_s, mean_busy, wait_s, moved, parts, slow, *slow_link(job.ranks, job.facts))


def _slow(ranks: list[int], series: dict[str, Floats], busy: Floats, step_s: float) -> tuple[Slow | None, bool]:
    """The slow rank, if there is one; and whether there is one at each time, but not always the same."""
    if len(ranks) < 2:
        return None, False
    last = np.bincount(np.nan_to_num(busy, nan=-1.0).argmax(-1), minlength=len(ranks)) / len(busy)
    mean_busy = np.nanmean(busy, 0)
    at = int(mean_busy.argmax())
    others = _others(mean_busy, at)
    if mean_busy[at] - others < LEAST_EXCESS * step_s:
        apart = float(np.nanmean(np.nanmax(busy, -1) - np.nanmedian(busy, -1)))
        return None, apart > LEAST_EXCESS * step_s
    later = busy[:, at] - np.nanmedian(np.delete(busy, at, -1), -1)
    often = float((later >= LEAST_EXCESS * step_s).mean())
    # Medians: a mean over few steps would name the part in which the machine stood still a few times. Of the slowest
    # steps: a rank that is slow in every tenth step would be named by the chance of the others.
    slow = later >= min((mean_busy[at] - others) / 2, np.nanmax(later))
    usual = {name: np.nanmedian(values[slow], 0) for name, values in series.items()}
    excess = {name: float(values[at]) - _others(values, at) for name, values in usual.items()}
    part = _part(usual, at, excess)
    return Slow(ranks[at], part, float(mean_busy[at]), others, float(last[at]), often, excess), False


def _part(usual: dict[str, Floats], at: int, excess: dict[str, float]) -> str:
    """The part that makes rank number `at` slow, from all ranks' usual seconds in its slow steps."""
    largest = max(excess, key=lambda name: excess[name])
    if largest not in ("forward", "backward"):
        return largest
    factors = [float(usual[name][at]) / max(_others(usual[name], at), 1e-9) for name in ("forward", "backward")]
    both = min(factors) > 1.1 and min(excess["forward"], excess["backward"]) > 0.15 * excess[largest]
    return "computing" if both and max(factors) < ALIKE * min(factors) else largest


def _others(values: Floats, at: int) -> float:
    return float(np.median(np.delete(values, at)))


def slow_link(ranks: list[int], facts: list[dict[str, Any]]) -> tuple[list[int], float]:
    """Ranks at the ends of the slow connections, and how many times as long their round trips take as the others'.

    Data queues before a slow link, so its round trips take long. Connections of two ranks are identified by their
    ends. One rank: all of its connections that carry much are slow, and no others are. Two: only their connection is
    slow. None: no connection is slow, or none was measured.

    >>> trips = {(0, 1): 0.02, (1, 2): 0.015, (0, 2): 1e-4}
    >>> facts = [{"links": [
    ...     {"local": f"{own}-{peer}", "remote": f"{peer}-{own}", "rtt_s": seconds, "sent_bytes": 10**7}
    ...     for pair, seconds in trips.items() if own in pair for peer in pair if peer != own
    ... ]} for own in range(3)]
    >>> ranks, ratio = slow_link([0, 1, 2], facts)
    >>> ranks, round(ratio)
    ([1], 150)
    """
    links = [(rank, link) for rank, one in zip(ranks, facts, strict=True) for link in one.get("links", ())]
    owner = {link["local"]: rank for rank, link in links}
    most = max((link["sent_bytes"] for _, link in links), default=0)
    by_pair: dict[tuple[int, int], float] = {}
    for rank, link in links:
        peer = owner.get(link["remote"], rank)
        if peer != rank and link["rtt_s"] and link["sent_bytes"] >= LEAST_CARRIED * most:
            pair = min(rank, peer), max(rank, peer)
            by_pair[pair] = max(by_pair.get(pair, 0.0), float(link["rtt_s"]))
    if len(by_pair) < 2:
        return sorted(next(iter(by_pair), ())), float("nan")
    best: tuple[list[int], float] = ([], 1.0)
    for rank in ranks:
        own = [seconds for pair, seconds in by_pair.items() if rank in pair]
        rest = [seconds for pair, seconds in by_pair.items() if rank not in pair]
        if own and rest:
            best = max(best, ([rank], min(own) / statistics.median(rest)), key=lambda found: found[1])
    return best if best[1] > SLOW_LINK else ([], best[1])
