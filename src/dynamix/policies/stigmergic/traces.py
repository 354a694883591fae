"""A worker's own view of a window, and the traces that it leaves in the shared field.

Fourteen traces (`TRACES`), read as means over `present`, or over `late`, `heavy`, `heard` and `aiming` if only some
workers know a figure. So no worker needs to know who left a trace, and a worker that leaves is forgotten. Loads are
counted in even shares of the base batch, times in steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dynamix.model.measured import base_total, busy_seconds
from dynamix.window import Floats, Window


class TraceKind(IntEnum):
    """Index of a trace in the last dimension of the traces. "Last" is the last of all workers to finish."""

    PRESENT = 0  # 1 for every worker and window
    LOAD = 1  # own size over the even share of the base batch
    SPEED = 2  # loads computed in the time of a step, after fixed costs; 0 if the own size is at a bound
    OFFSET = 3  # loads that would be computed in the time of the fixed costs
    HELD = 4  # load and offset of a worker whose size is at a bound: it takes no part in sharing the rest
    LATE = 5  # most time not blocked, as a share of a step, over the last worker's of before, to a high power
    WAIT = 6  # least time blocked, as a share of a step, times late: what the exchange adds
    HEAVY = 7  # part of the step that the own smallest size takes, to a high power: near 1 if it would fill the step
    FLOOR = 8  # the same part, times heavy
    NOISE = 9  # own part of the noise in |g|^2, over a mean |g|^2
    HEARD = 10  # own part of |g|^2 over the same: 1 for each worker that knows its own part, if the batch is constant
    AIM = 11  # log of the crowd's load that teaches most a second, by this worker's estimate a window before
    AIMING = 12  # 1 for each worker with an estimate
    OOM = 13  # 1 when memory ran out


TRACES = tuple(trace.name.lower() for trace in TraceKind)
LEAST_OF_FEW = 1.2  # the least of some five steps is this many standard deviations below their mean


@dataclass(frozen=True, slots=True)
class Own:
    """One worker's window, or those of many workers: arrays of one shape, (..., W). NaN if not measured."""

    size: Floats  # samples per round in force
    unit: Floats  # the even share of the base batch, samples per round
    busy: Floats  # s of computing and loading per optimizer step, for `size` samples of mean cost
    # s per step from the own last gradient to the end of the exchange: waiting and transfer, which one worker cannot
    # separate. `least` is the smallest of the window: in the step in which this worker was last it is transfer alone.
    blocked: Floats
    least: Floats
    jitter: Floats  # standard deviation of a step's `busy`, relative
    steps: Floats  # in the window
    noise: Floats  # own part of the noise's share of |g|^2: its mean over workers is tr(Sigma) / (B |g|^2)
    # own part of |g|^2 at this batch, relative to the one used for `noise`; 1 if they are the same
    square: Floats
    fits: Floats  # most samples that memory is known to hold; infinite if it never ran out
    workers: int

    @property
    def load(self) -> Floats:
        """`size` over the even share of the base batch."""
        return self.size / self.unit

    @classmethod
    def of(cls, window: Window) -> Own:
        """All workers of `window`, each with its own measurements.

        If gradient norms were not measured (the simulator has none), each worker's part of the noise follows from the
        window's noise scale.
        """
        size = window.batch_size.astype(np.float64)
        unit = np.broadcast_to(base_total(window)[..., None] / window.workers, size.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            jitter = window.compute_std / window.compute
            # A window has no single steps, so assume that waiting varies as the own computing does.
            wait = np.maximum(window.wait - LEAST_OF_FEW * np.nan_to_num(window.compute_std), 0.0)
            least = wait + window.communication
            weight = size / window.batch_size.sum(-1, keepdims=True)
        noise = noise_part(weight, window.gradient_norm_sq, window.global_norm_sq[..., None], window.workers)
        scale, total = window.noise_scale[..., None], window.global_batch[..., None]
        with np.errstate(invalid="ignore"):
            told = np.where(np.isposinf(scale), 1.0, scale / (scale + total))
        noise, steps = np.where(np.isnan(noise), told, noise), np.broadcast_to(window.steps[..., None], size.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            busy = busy_seconds(window) * (size / window.worked)
        blocked, fits = window.wait + window.communication, np.full(size.shape, np.inf)
        square = np.ones(size.shape)
        return cls(size, unit, busy, blocked, least, jitter, steps, noise, square, fits, window.workers)


def noise_part(weight: Floats, local_sq: Floats, global_sq: Floats, workers: int) -> Floats:
    """One worker's part of the noise's share of |g|^2, from its own norms: W/(W-1) w_i (|g_i|^2 / |g|^2 - 1).

    The mean over workers is the pooled estimate of `measure.noise.NoiseScale` over B |g|^2. NaN for a single worker.

    >>> from dynamix.runtime.measure.noise import NoiseScale
    >>> local, weight = np.array([5.0, 3.0]), np.array([1 / 3, 2 / 3])
    >>> S, _ = NoiseScale.estimate(local, 2.0, np.array([2.0, 4.0]))
    >>> bool(abs(noise_part(weight, local, np.array(2.0), 2).mean() - S / (6 * 2.0)) < 1e-12)
    True
    """
    if workers < 2:
        return np.full(np.shape(weight), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = workers / (workers - 1) * weight * (local_sq / global_sq - 1.0)
    return np.where(np.isfinite(part), part, np.nan)
