"""What a sample teaches: the gradient noise scale, how it grows, and progress per step."""

from __future__ import annotations

import numpy as np

from dynamix.window import Floats


def efficiency(noise_scale: Floats, batch: Floats, base_batch: Floats) -> Floats:
    """Progress per sample relative to the base batch, (phi + B0) / (phi + B) (Pollux; equals AdaScale's gain * B0/B).

    >>> float(efficiency(512.0, 1536.0, 512.0))
    0.5
    """
    return np.asarray((noise_scale + base_batch) / (noise_scale + batch))


def noise_scale(start: Floats, progress: Floats, unit: Floats, growth: Floats) -> Floats:
    """phi after `progress` base-batch samples: start * (1 + progress/unit)^growth, capped at 64 times the start."""
    return np.asarray(start * np.minimum((1.0 + progress / unit) ** growth, 64.0))
