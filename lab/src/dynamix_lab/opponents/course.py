"""A scenario's hosts and links over time, as stretches between two changes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dynamix_lab.emulator import Scenario, host_links, host_speeds
from dynamix_lab.emulator.schedule import next_change_s


class Stretch(NamedTuple):
    """A time in which nothing changes.

    until_s         its end; infinite if nothing changes any more
    speeds          of each host's job: cores, or relative speed of device hosts
    slowest_mbit_s  rate left to the job on the slowest link; infinite if no rate is limited
    latency_s       added to a packet between the two neighbours of the ring that are furthest apart
    """

    until_s: float
    speeds: tuple[float, ...]
    slowest_mbit_s: float
    latency_s: float


class Course:
    """A scenario over time, for one seed of its disturbances. Each stretch is computed once.

    >>> from dynamix_lab.emulator import load_scenario
    >>> Course(load_scenario("even"), seed=0).at(3.0).speeds
    (0.35, 0.35, 0.35, 0.35)
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self._starts, self._stretches = [0.0], [self._stretch(0.0)]

    def at(self, time_s: float) -> Stretch:
        """The stretch at `time_s` (0 or more)."""
        while (start_s := self._stretches[-1].until_s) <= time_s:
            self._starts.append(start_s)
            self._stretches.append(self._stretch(start_s))
        return self._stretches[bisect.bisect_right(self._starts, time_s) - 1]

    def done_s(self, amount: float, start_s: float, rate: Callable[[Stretch], float]) -> float:
        """When `amount` is done, if it begins at `start_s` and advances by each stretch's `rate` per second."""
        now_s = start_s
        while True:
            stretch = self.at(now_s)
            per_s = rate(stretch)
            end_s = now_s + amount / per_s
            if end_s <= stretch.until_s:
                return end_s
            amount -= (stretch.until_s - now_s) * per_s
            now_s = stretch.until_s

    def _stretch(self, start_s: float) -> Stretch:
        until_s = next_change_s(self.scenario, start_s)
        links = host_links(self.scenario, start_s, self.seed)
        latencies = [(a.latency_ms + b.latency_ms) / 1000 for a, b in zip(links, links[1:] + links[:1], strict=True)]
        return Stretch(
            math.inf if until_s is None else until_s,
            tuple(host_speeds(self.scenario, start_s, self.seed)),
            slowest_link(self.scenario, start_s, self.seed),
            max(latencies) if len(links) > 1 else 0.0,
        )


def slowest_link(scenario: Scenario, time_s: float, seed: int) -> float:
    """Mbit/s left to the job on the slowest link at `time_s`; infinite if no rate is limited."""
    rates = [np.inf]
    for link in host_links(scenario, time_s, seed):
        ways = [rate for rate in (link.up_mbit_s, link.down_mbit_s) if rate is not None]
        rates += [max(rate - link.background_mbit_s, 0.1 * rate) for rate in ways]
    return float(min(rates))


def ring_mbit(workers: int, payload_bytes: float) -> float:
    """The data that a ring all-reduce of a payload sends over each link, Mbit.

    >>> ring_mbit(4, 1e6)
    12.0
    """
    return 2 * (workers - 1) / workers * payload_bytes * 8e-6
