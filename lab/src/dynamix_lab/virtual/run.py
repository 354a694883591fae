"""The record of a run on the virtual clock: its steps and its snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynamix.window import Floats, Ints


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Training at one moment of the virtual clock; `score` is what `run(score=)` returned, NaN without it."""

    step: int
    samples: int
    time_s: float
    score: float


class Step(NamedTuple):
    """One optimizer step. Its fields are `VirtualRun`'s, in the same order."""

    time_s: float
    step_s: float
    compute_s: Floats
    counts: Ints
    loss: float
    piece: int


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """The result of one call of `VirtualCluster.run`: k optimizer steps of W workers.

    time_s      (k,) virtual seconds at the end of each step, since the cluster was made
    step_s      (k,) duration of each step
    compute_s   (k, W) of this, each worker's computing; the rest is waiting and transfer
    counts      (k, W) samples of each worker
    loss        (k,) mean loss of the union batch, before the step's update
    pieces      (k,) samples of a worker's local step; 0: a step of all workers
    snapshots   in order
    """

    time_s: Floats
    step_s: Floats
    compute_s: Floats
    counts: Ints
    loss: Floats
    pieces: Ints
    snapshots: list[Snapshot]

    @classmethod
    def of(cls, steps: list[Step], snapshots: list[Snapshot]) -> VirtualRun:
        """The arrays of one or more steps."""
        time_s, step_s, compute_s, counts, loss, pieces = (np.array(column) for column in zip(*steps, strict=True))
        return cls(time_s, step_s, compute_s, counts, loss, pieces, snapshots)

    @property
    def wait_fraction(self) -> float:
        """Fraction of all workers' time that was spent waiting for slower ones (without transfer)."""
        waited = (self.compute_s.max(1, keepdims=True) - self.compute_s).sum()
        return float(waited / (self.step_s.sum() * self.counts.shape[1]))
