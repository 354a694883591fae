"""Seconds for the gradient exchange: ring all-reduce over unequal links, partly overlapping with backward."""

import numpy as np
from numpy.typing import ArrayLike

from dynamix.window import Floats


def ring_all_reduce(workers: int, latency_s: ArrayLike, gradient_bytes: ArrayLike, bytes_per_s: ArrayLike) -> Floats:
    """2 (W-1) latency + 2 (W-1)/W bytes / bandwidth of the slowest link (ring all-reduce); 0 for one worker.

    >>> float(ring_all_reduce(2, 0.001, 4e6, 1e8))
    0.042
    """
    hops = 2 * (workers - 1)
    moved = hops / workers * np.asarray(gradient_bytes, np.float64)
    return np.asarray(hops * np.asarray(latency_s, np.float64) + moved / np.asarray(bytes_per_s, np.float64))


def exchange_time(at_rest_s: Floats, bytes_share: Floats, link: Floats) -> Floats:
    """Seconds (C,) of an exchange, which the slowest link determines.

    at_rest_s     (C,) without slowdown of any link
    bytes_share   (C,) the fraction of it for bytes over the slowest link; the rest is latency
    link          (C, W) present slowness of each link, 1 for the slowest at rest

    >>> exchange_time(np.array([1.0]), np.array([0.5]), np.array([[1.0, 3.0]])).tolist()
    [2.0]
    """
    return np.asarray(at_rest_s * (1.0 - bytes_share + bytes_share * link.max(-1)))


def step_time(computing: Floats, exchange: Floats, overlap: Floats) -> Floats:
    """(computing^gamma + exchange^gamma)^(1/gamma) (Pollux): gamma 1 is no overlap, 10 hides most of the shorter."""
    top, other = np.maximum(computing, exchange), np.minimum(computing, exchange)
    ratio = other / np.maximum(top, 1e-12)
    return np.asarray(top * (1.0 + ratio**overlap) ** (1.0 / overlap))
