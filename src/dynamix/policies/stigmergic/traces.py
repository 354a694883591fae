"""A worker's own view of a window, and the traces that it leaves of it in the shared field.

Fourteen traces (`TRACES`), read as means over `present`, or over `late`, `heavy`, `heard` and `aiming` where only some
know something. So nobody needs to know who left what, and who leaves no more is forgotten. Loads are counted in even
shares of the base batch, times in steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dynamix.model.measured import base_total, busy_seconds
from dynamix.window import Floats, Window


class TraceKind(IntEnum):
    """Index of a trace in the last dimension of what is left and read. `last` is the last of all to finish."""

    PRESENT = 0  # 1 for every worker and window
    LOAD = 1  # own size over the even share of the base batch
    SPEED = 2  # loads computed in the time of a step, once fixed costs are paid; 0 at a bound of the own size
    OFFSET = 3  # loads that would be computed in the time of the fixed costs
    HELD = 4  # load and offset of a worker whose size is at a bound: it has no part in what the others share out
    LATE = 5  # most that was not spent blocked, as a share of a step, over the last one's of before, to a high power
    WAIT = 6  # the least that was spent blocked, as a share of a step, times late: what the exchange adds
    HEAVY = 7  # the part of the step that the own smallest size takes, to a high power: near 1 for who would fill it
    FLOOR = 8  # the same part, times heavy
    NOISE = 9  # own part of the noise in |g|^2, over a mean |g|^2
    HEARD = 10  # own part of |g|^2 over the same: 1 for every worker that knows its own part while the batch stands
    AIM = 11  # log of the crowd's load that teaches most a second, as this worker found it a window before
    AIMING = 12  # 1 for every worker that found one
    OOM = 13  # 1 when memory ran out


TRACES = tuple(trace.name.lower() for trace in TraceKind)
LEAST_OF_FEW = 1.2  # standard deviations that the least of some five steps lies below their mean


@dataclass(frozen=True, slots=True)
class Own:
    """One worker's window, or many workers' side by side: arrays of one shape, (..., W). NaN where not measured."""

    size: Floats  # samples per round in force
    unit: Floats  # the even share of the base batch, samples per round
    busy: Floats  # s of computing and loading per optimizer step, for `size` samples of mean cost
    # s per step from the own last gradient to the end of the exchange: waiting and transfer, which one worker cannot
    # tell apart; and the smallest of the window: in the step in which this worker was last it is the transfer alone
    blocked: Floats
    least: Floats
    jitter: Floats  # standard deviation of a step's `busy`, relative
    steps: Floats  # in the window
    noise: Floats  # own part of the noise's share of |g|^2: its mean over workers is tr(Sigma) / (B |g|^2)
    # own part of |g|^2 at this batch, over the one that `noise` is a share of; 1 where they are the same
    square: Floats
    fits: Floats  # most samples that memory is known to hold; infinite if it never ran out
    workers: int

    @property
    def load(self) -> Floats:
        """`size` over the even share of the base batch."""
        return self.size / self.unit

    @classmethod
    def of(cls, window: Window) -> Own:
        """All workers of `window`, each as it would know itself.

        If gradient norms were not measured (the simulator has none), each worker's part of the noise is what the
        window's noise scale says.
        """
        size = window.batch_size.astype(np.float64)
        unit = np.broadcast_to(base_total(window)[..., None] / window.workers, size.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            jitter = window.compute_std / window.compute
            # A window has no single steps: as if waiting varied as the own computing does.
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
    """One worker's part of the noise's share of |g|^2, from what it knows: W/(W-1) w_i (|g_i|^2 / |g|^2 - 1).

    The mean over workers is the pooled estimate of `gradients.NoiseScale` over B |g|^2. NaN for a single worker.

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
