"""Seconds that a worker computes: affine in its batch, with measured curves and memory cliffs, times jitter."""

from dataclasses import dataclass

import numpy as np

from dynamix.window import Floats, Ints
from dynamix_lab.simulator.calibration import OCTAVE_PARTS, calibration

_SIZES = 96  # grid points of the inverse of a curve that is not affine


def jitter(bits: np.ndarray, deviation: Floats, stall: Floats) -> Floats:
    """Factors (C, W) on seconds: 1 + `deviation`, and in one step of eight a stall of +`stall`.

    The stall is the second mode under CPU quotas: a step that exceeds its period's quota waits for the next period.
    """
    return np.asarray(np.maximum(1.0 + deviation + np.where((bits >> 61) == 0, stall, 0.0), 0.3))


def near_normal(bits: np.ndarray) -> Floats:
    """Sum of four 15-bit uniforms, scaled to mean 0 and sd 1: fast, and bounded, so that times stay positive."""
    total = (bits & 0x7FFF) + ((bits >> 15) & 0x7FFF) + ((bits >> 30) & 0x7FFF) + ((bits >> 45) & 0x7FFF)
    return np.asarray((total.astype(np.float64) / 32767.0 - 2.0) * np.sqrt(3.0))


def costs_of_samples(batch: Ints, sigma: Floats, normal: Floats) -> Floats:
    """The total cost of batches of samples with different costs, in samples (C, W): each is log-normal with mean 1.

    The sum of n samples is approximated by one log-normal of equal mean and variance (Fenton 1960): exact for n = 1.

    batch    (C, W) samples
    sigma    (C, 1) sd of the log of one sample's cost
    normal   (C, W) standard normal draws
    """
    samples = batch.astype(np.float64)
    variance = np.log1p(np.expm1(sigma**2) / np.maximum(samples, 1.0))
    return np.asarray(samples * np.exp(np.sqrt(variance) * normal - variance / 2))


def costs_when_cut(batch: Ints, sigma: Floats, normal: Floats, place: Floats) -> Floats:
    """The cost of batches if a round is divided between workers by its samples' costs, in samples (C, W).

    The whole round has the cost of `costs_of_samples`. Shares end at whole samples, so each end is up to half a
    sample's cost from its ideal place, and expensive samples are more often at an end. A worker has at least two cheap
    samples (`dynamix.data.lengths`), or one with a share of 1.

    batch    (C, W) samples, the shares
    sigma    (C, 1) sd of the log of one sample's cost
    normal   (C, W) standard normal draws
    place    (C, W) draws in (0, 1)
    """
    total = batch.sum(-1, keepdims=True)
    whole = costs_of_samples(total, sigma, normal[:, :1])
    beyond = (place - 0.5) * np.exp(sigma * normal + sigma**2 / 2)
    beyond = np.where(np.cumsum(batch, -1) < total, beyond, 0.0)  # nothing is divided after the last share
    wanted = batch * (whole / np.maximum(total, 1)) + np.diff(beyond, axis=-1, prepend=0.0)
    least = np.minimum(batch, 2) * np.exp(-(sigma**2) / 2 - sigma)
    cut = np.where(batch > 0, np.maximum(wanted, least), 0.0)
    return np.asarray(cut * (whole / np.maximum(cut.sum(-1, keepdims=True), 1e-12)))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds by batch size for (C, W) workers: alpha + beta b, times a measured curve, times a cliff.

    curve         rows of `calibration().curves`, -1 for affine; None: all affine
    cliff_at      samples beyond which memory is short; None: no cliff
    cliff_slope   a batch of (1 + x) cliff_at takes 1 + cliff_slope x times as long
    """

    alpha: Floats
    beta: Floats
    curve: Ints | None = None
    cliff_at: Floats | None = None
    cliff_slope: Floats | None = None

    @property
    def affine(self) -> bool:
        """Whether every worker's seconds are alpha + beta b."""
        return self.curve is None and self.cliff_at is None

    def seconds(self, batch: Floats) -> Floats:
        """Undisturbed seconds (C, W), or (C, W, K) for K candidates; 0 for an idle worker (batch 0)."""
        more = batch.ndim - self.alpha.ndim
        alpha, beta = _like(self.alpha, more), _like(self.beta, more)
        taken = alpha + beta * batch
        if self.curve is not None:
            taken = taken * _curve(_like(self.curve, more), batch)
        if self.cliff_at is not None and self.cliff_slope is not None:
            beyond = np.maximum(batch / _like(self.cliff_at, more) - 1.0, 0.0)
            taken = taken * (1.0 + _like(self.cliff_slope, more) * beyond)
        return np.where(batch > 0, taken, 0.0)

    def within(self, finish_s: Floats, factor: Floats, high: Floats) -> Floats:
        """The largest real sizes (C, W, K) in [1, high] that finish within `finish_s` (C, K) at slowdowns `factor`."""
        budget = finish_s[:, None, :] / factor[..., None]
        if self.affine:
            return np.asarray(np.clip((budget - self.alpha[..., None]) / self.beta[..., None], 1.0, high[..., None]))
        grid = np.exp(np.linspace(0.0, np.log(high), _SIZES, axis=-1))  # (C, W, G)
        # Curves may fall, so search the largest size in time from the right.
        least = np.minimum.accumulate(self.seconds(grid)[..., ::-1], -1)[..., ::-1]
        index = np.clip((least[:, :, None, :] <= budget[..., None]).sum(-1) - 1, 0, _SIZES - 2)
        low, high_s = (np.take_along_axis(least, index + i, -1) for i in (0, 1))
        part = np.clip((budget - low) / np.maximum(high_s - low, 1e-12), 0.0, 1.0)
        below, above = (np.take_along_axis(grid, index + i, -1) for i in (0, 1))
        return np.asarray(below + part * (above - below))


def _like(values: np.ndarray, more: int) -> np.ndarray:
    return values[..., None] if more else values


def _curve(rows: Ints, batch: Floats) -> Floats:
    """Factors on the affine fit, interpolated in log2(batch); 1 where `rows` is -1."""
    table = calibration().curves
    at = np.clip(np.log2(np.maximum(batch, 1.0)) * OCTAVE_PARTS, 0.0, table.shape[1] - 1.001)
    low = at.astype(np.int64)
    part, picked = at - low, np.maximum(rows, 0)
    return np.where(rows >= 0, table[picked, low] * (1 - part) + table[picked, low + 1] * part, 1.0)
