"""What a worker knows by itself after a window, and what it leaves of that in the shared field.

Sixteen traces (`TRACES`), read as means over `present`, or over `late`, `heavy`, `heard` and `aiming` where only some
know something. So nobody needs to know who left what, and who leaves no more is forgotten. Loads are counted in even
shares of the base batch, times in steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynamix.model.measured import base_total, busy_seconds
from dynamix.window import Floats, Window

# present  1 for every worker and window
# load     own size over the even share of the base batch
# speed    loads that the worker computes in the time of a step, once its fixed costs are paid; 0 at a bound of its size
# offset   loads that it would compute in the time of its fixed costs
# held     load and offset of a worker whose size is at a bound: it has no part in what the others share out
# late     near 1 for who was last in some step, near 0 for who waits: the share of a step that was not spent blocked,
#          at most, over the last one's as it was smelt before, to a high power
# wait     the share of a step spent blocked, at least, times late: what the exchange adds
# heavy    near 1 for who would fill the step with its smallest size: the part of the step that takes, to a high power
# floor    the same part, times heavy
# noise    own part of the noise's share of |g|^2
# heard    1 for every worker that knows its own part
# grow, shrink   by which part the own size was just changed beyond what all changed alike, times load
# aim      log of the crowd's load that teaches most a second, as this worker finds it
# aiming   1 for every worker that found one
# oom      1 when memory ran out
TRACES = (
    "present",
    "load",
    "speed",
    "offset",
    "held",
    "late",
    "wait",
    "heavy",
    "floor",
    "noise",
    "heard",
    "grow",
    "shrink",
    "aim",
    "aiming",
    "oom",
)
PRESENT, LOAD, SPEED, OFFSET, HELD, LATE, WAIT, HEAVY, FLOOR, NOISE, HEARD, GROW, SHRINK, AIM, AIMING, OOM = range(
    len(TRACES)
)


LEAST_OF_FEW = 1.2  # standard deviations that the least of some five steps lies below their mean


@dataclass(frozen=True, slots=True)
class Own:
    """One worker's window, or many workers' side by side: arrays of one shape, (..., W). NaN where not measured.

    size      samples per micro-batch in force
    unit      the even share of the base batch, samples per micro-batch
    busy      s of computing and loading per optimizer step
    blocked   s per step from the own last gradient to the end of the exchange: waiting and transfer, which one worker
              cannot tell apart
    least     the smallest of that over the window's steps: in the step in which this worker was last of all it is the
              transfer alone
    jitter    standard deviation of a step's `busy`, relative
    steps     in the window
    noise     own part of the noise's share of |g|^2: its mean over workers is tr(Sigma) / (B |g|^2)
    fits      most samples that memory is known to hold; infinite if it never ran out
    workers   W
    """

    size: Floats
    unit: Floats
    busy: Floats
    blocked: Floats
    least: Floats
    jitter: Floats
    steps: Floats
    noise: Floats
    fits: Floats
    workers: int

    @property
    def load(self) -> Floats:
        """`size` over the even share of the base batch."""
        return self.size / self.unit

    @classmethod
    def of(cls, window: Window) -> Own:
        """All workers of `window`, each as it would know itself.

        Where gradient norms were not measured (the simulator has none) each worker's part of the noise is what the
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
        return cls(
            size=size,
            unit=unit,
            busy=busy_seconds(window),
            blocked=window.wait + window.communication,
            least=least,
            jitter=jitter,
            steps=np.broadcast_to(window.steps[..., None], size.shape),
            noise=np.where(np.isnan(noise), told, noise),
            fits=np.full(size.shape, np.inf),
            workers=window.workers,
        )


def noise_part(weight: Floats, local_sq: Floats, global_sq: Floats, workers: int) -> Floats:
    """One worker's part of the noise's share of |g|^2, from what it knows: W/(W-1) w_i (|g_i|^2 / |g|^2 - 1).

    The mean over workers is the pooled estimate of `gradients.NoiseScale` over B |g|^2. NaN for a single worker.

    >>> from dynamix.runtime.noise import NoiseScale
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
