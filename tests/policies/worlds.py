"""Windows of clusters whose costs are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamix.window import Window


def affine(
    sizes: np.ndarray, alpha: Any, beta: Any, *, exchange: float = 0.1, phi: float = 900.0, overlap: float = 1.0
) -> Window:
    """One noiseless window of an affine cluster."""
    seconds = np.asarray(alpha) + np.asarray(beta) * sizes
    slowest = seconds.max(-1, keepdims=True)
    whole = (slowest**overlap + exchange**overlap) ** (1 / overlap)
    known = {
        "compute": seconds,
        "compute_std": 1e-4 * seconds,
        "wait": slowest - seconds,
        "communication": whole - slowest,
    }
    return Window.of(sizes, **known, data=0.0, noise=phi, signal=1.0, steps=5, base_batch=64 * sizes.shape[-1])


def goodput(sizes: np.ndarray, alpha: Any, beta: Any, exchange: float, phi: float, overlap: float = 1.0) -> np.ndarray:
    """Samples of the noise scale's worth a second, (...)."""
    slowest, total = (np.asarray(alpha) + np.asarray(beta) * sizes).max(-1), sizes.sum(-1)
    return np.asarray(total / (slowest**overlap + exchange**overlap) ** (1 / overlap) / (phi + total))
