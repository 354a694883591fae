"""Seconds a worker computes: affine in its batch, times a disturbance, times jitter."""

from __future__ import annotations

import numpy as np

from dynamix.simulator.streams import Stream
from dynamix.window import Floats


def jitter(stream: Stream, counter: np.uint64, sd: Floats, stall: Floats) -> Floats:
    """Factors (C, W) with mean about 1: near-normal of `sd`, and in one step of eight a stall of +`stall`.

    The stall is the second mode that CPU quotas give: a step that meets the end of its period waits out the rest.
    """
    bits = stream.bits(counter)
    # Sum of four 15-bit uniforms: near-normal (sd 1/sqrt(3) after scaling), cheap, and bounded, so times stay positive.
    total = (bits & 0x7FFF) + ((bits >> 15) & 0x7FFF) + ((bits >> 30) & 0x7FFF) + ((bits >> 45) & 0x7FFF)
    normal = (total.astype(np.float64) / 32767.0 - 2.0) * np.sqrt(3.0)
    stalled = (bits >> 61) == 0
    return np.asarray(np.maximum(1.0 + sd * normal + np.where(stalled, stall, 0.0), 0.3))


def compute_time(alpha: Floats, beta: Floats, batch: Floats, factor: Floats) -> Floats:
    """(alpha + beta * batch) * factor, s; an idle worker (batch 0) takes none."""
    return np.where(batch > 0, (alpha + beta * batch) * factor, 0.0)
