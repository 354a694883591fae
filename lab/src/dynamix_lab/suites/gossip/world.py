"""Simulated workers without a barrier: speeds, deaths, a partition and a network that slows, as functions of time.

Times are counted in pieces of a worker of median speed, samples in pieces. All rules meet the same world.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamix.window import Floats, Ints

SLOT = 5.0  # conditions hold for so long
LONG = 600.0
MEETING = 3.0
SPREAD, DRIFT, MEMORY = 0.5, 0.3, 50.0  # standard deviations of log speed among workers and over time, and its memory
LIFE, ABSENCE = 200.0, 40.0  # means
TROUBLE = (200.0, 320.0)  # when the network is cut in two, or slow
SLOWER = 10.0  # meetings over a slow network
PLACES = ("steady", "drift", "churn", "partition", "slow network", "cheap network", "dear network", "groups")
GROUP = 16  # workers that meet, where not all do


@dataclass(frozen=True, slots=True)
class GossipWorld:
    """What happens to W workers in slots of `SLOT`.

    speed     pieces in a unit of time (W, slots)
    alive     (W, slots)
    meeting   how long a meeting takes (slots,)
    half      0 or 1, which part of the network a worker is in while it is cut (W,)
    cut       (slots,)
    """

    speed: Floats
    alive: NDArray[np.bool_]
    meeting: Floats
    half: Ints
    cut: NDArray[np.bool_]
    _pieces: Floats  # (W, slots + 1) by time, as if always alive

    @property
    def workers(self) -> int:
        return len(self.speed)

    @property
    def end(self) -> float:
        """When it is over."""
        return SLOT * len(self.meeting)

    @staticmethod
    def at(time: float) -> int:
        """The slot of a time."""
        return int(time // SLOT)

    def pieces(self, who: Ints, until: Floats) -> Floats:
        """Pieces that workers `who` could have trained from the beginning to times `until`, both (n,)."""
        slot = np.minimum((until // SLOT).astype(np.int64), self.speed.shape[1] - 1)
        return np.asarray(self._pieces[who, slot] + self.speed[who, slot] * (until - SLOT * slot))

    def capacity(self) -> float:
        """Pieces that all workers could train while they live, if nobody ever waited or met."""
        return float((self.speed * self.alive).sum() * SLOT)


def made_world(place: str, workers: int, seed: int) -> GossipWorld:
    """The world of a place by name (`PLACES`). Same arguments, same world."""
    rng = np.random.default_rng([seed, workers, 11])
    slots = int(LONG / SLOT)
    log_speed = SPREAD * rng.standard_normal((workers, 1))
    moves, keeps = rng.standard_normal((workers, slots)), np.exp(-SLOT / MEMORY)
    drift = np.empty((workers, slots))
    drift[:, 0] = DRIFT * moves[:, 0]
    for slot in range(1, slots):
        drift[:, slot] = keeps * drift[:, slot - 1] + DRIFT * np.sqrt(1 - keeps**2) * moves[:, slot]
    speed = np.exp(log_speed + (drift if place != "steady" else np.zeros_like(drift)))
    chances, alive = rng.random((workers, slots)), np.ones((workers, slots), dtype=bool)
    if place == "churn":
        for slot in range(1, slots):
            dies, comes = chances[:, slot] < SLOT / LIFE, chances[:, slot] < SLOT / ABSENCE
            alive[:, slot] = np.where(alive[:, slot - 1], ~dies, comes)
    times = SLOT * np.arange(slots)
    trouble = (times >= TROUBLE[0]) & (times < TROUBLE[1])
    usual = MEETING * {"cheap network": 1 / SLOWER, "dear network": SLOWER}.get(place, 1.0)
    meeting = np.where(trouble & (place == "slow network"), SLOWER * MEETING, usual)
    cut = trouble & (place == "partition")
    pieces = np.concatenate([np.zeros((workers, 1)), np.cumsum(speed * SLOT, axis=1)], axis=1)
    return GossipWorld(speed, alive, meeting, rng.permutation(workers) % 2, cut, pieces)
