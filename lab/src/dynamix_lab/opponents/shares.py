"""How many local steps each worker takes before the next averaging, given the times of its steps."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dynamix.errors import ConfigError
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints

REMEMBERED = 3  # a worker's time is the median of so many rounds, so that one pause has no effect
LONGER = 1.5  # a round may have up to this many times the steps asked for, if workers then wait less
GOOD_ENOUGH = 0.97  # of the best use of all workers' time: the shortest round that reaches it is taken
FIRST_STEPS = 2  # of every worker in the first round, which only measures


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The work of every worker until the next averaging, the same on all ranks.

    start    samples of the global stream used by earlier rounds
    steps    (W,) local steps of each worker
    pieces   (W,) samples in each of a worker's steps
    """

    start: int
    steps: Ints
    pieces: Ints

    @property
    def samples(self) -> Ints:
        """(W,) samples each worker uses."""
        return self.steps * self.pieces

    def begins(self, worker: int) -> int:
        """The place in the global stream at which the worker's samples begin."""
        return self.start + int(self.samples[:worker].sum())


def steps_of(speeds: ArrayLike, mean_steps: int) -> Ints:
    """Steps (W,) in proportion to `speeds` (W,), with mean `mean_steps`, at least 1 each (DyLU, arXiv 2401.09135).

    >>> steps_of([4.0, 2.0, 1.0, 1.0], 4).tolist()
    [8, 4, 2, 2]
    """
    wish = np.asarray(speeds, dtype=np.float64)
    return project(wish, Bounds.of(wish.size, 1, mean_steps * wish.size), total=mean_steps * wish.size)


def whole_steps(step_s: ArrayLike, mean_steps: int) -> Ints:
    """Steps (W,) of a round in which workers of `step_s` (W,) seconds a step wait little for each other.

    Steps are whole, so in a short round all wait for a slow worker's last step. This is the shortest round with
    `mean_steps` on average, or up to `LONGER` times as many, that uses the workers' time nearly as well as any.

    >>> whole_steps([1.0, 1.25, 2.0, 5.0], 2).tolist(), steps_of([1.0, 0.8, 0.5, 0.2], 2).tolist()
    ([5, 4, 2, 1], [3, 2, 2, 1])
    """
    seconds = np.asarray(step_s, dtype=np.float64).tolist()
    workers = len(seconds)
    least = mean_steps * workers
    # A heap of each worker's end after one more step. Giving each step to the first worker keeps rounds shortest.
    done = [(2 * s, worker) for worker, s in enumerate(seconds)]
    heapq.heapify(done)
    longest, steps, found = max(seconds), [1] * workers, list[tuple[float, list[int]]]()
    for total in range(workers, int(LONGER * least) + 1):
        if total >= least:
            found.append((sum(n * s for n, s in zip(steps, seconds, strict=True)) / longest, list(steps)))
        at, worker = heapq.heappop(done)
        longest, steps[worker] = max(longest, at), steps[worker] + 1
        heapq.heappush(done, (at + seconds[worker], worker))
    enough = GOOD_ENOUGH * max(use for use, _ in found)
    return np.array(next(steps for use, steps in found if use >= enough), dtype=np.int64)


class StepShares:
    """Plans rounds from measurements of earlier ones. Every rank has one, and all plan alike.

    batch_size      samples of a local step
    proportional    False: the same number of steps for all
    smaller_pieces  a worker whose one step is longer than a fair round takes smaller batches instead; in rounds of one
                    step, batches are in proportion to speed
    speeds          (W,) given relative speeds; None: measured
    """

    def __init__(
        self,
        workers: int,
        batch_size: int,
        *,
        proportional: bool = True,
        smaller_pieces: bool = False,
        speeds: ArrayLike | None = None,
    ) -> None:
        self.workers, self.batch_size = workers, batch_size
        self.proportional, self.smaller_pieces = proportional, smaller_pieces
        self._known = None if speeds is None else 1.0 / np.asarray(speeds, dtype=np.float64)
        if self._known is not None and self._known.shape != (workers,):
            raise ConfigError("speeds", self._known.size, f"{workers}, one for each worker", "check the trial")
        self._seen: deque[Floats] = deque(maxlen=REMEMBERED)

    def plan(self, start: int, mean_steps: int) -> RoundPlan:
        """The next round, with `mean_steps` on average over workers."""
        pieces = np.full(self.workers, self.batch_size, dtype=np.int64)
        step_s = self.step_s
        even = np.full(self.workers, mean_steps, dtype=np.int64)
        if not self.proportional:
            return RoundPlan(start, even, pieces)
        if step_s is None:
            return RoundPlan(start, np.minimum(even, FIRST_STEPS), pieces)
        if mean_steps == 1:  # synchronous training
            total = self.workers * self.batch_size
            shares = project(1.0 / step_s, Bounds.of(self.workers, 1, total), total=total)
            return RoundPlan(start, even, shares if self.smaller_pieces else pieces)
        if self.smaller_pieces:
            fair_s = mean_steps * self.workers / float((1.0 / step_s).sum())
            slow = step_s > fair_s
            pieces[slow] = np.maximum(np.floor(self.batch_size * fair_s / step_s[slow]), 1).astype(np.int64)
            step_s = np.where(slow, fair_s, step_s)
        return RoundPlan(start, whole_steps(step_s, mean_steps), pieces)

    @property
    def step_s(self) -> Floats | None:
        """(W,) seconds of a step with the full batch; None before the first measurement."""
        if self._known is not None:
            return self._known
        return np.median(np.stack(self._seen), axis=0) if self._seen else None

    def measured(self, plan: RoundPlan, step_s: Floats) -> None:
        """Record each worker's seconds of a step of `plan`, (W,). Smaller pieces count in proportion, so a fixed cost
        in them changes the size of the next ones until they fit."""
        if np.isfinite(step_s).all() and (step_s > 0).all():
            self._seen.append(step_s * self.batch_size / plan.pieces)
