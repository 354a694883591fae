"""Training statistics: the gradient noise scale over time, progress per step, and accuracy from progress."""

from dataclasses import dataclass

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


def along(knots: Floats, fraction: Floats) -> Floats:
    """Rows of `knots` (C, K), evenly spaced on [0, 1], interpolated at `fraction` (C,).

    >>> along(np.array([[0.0, 1.0, 4.0]]), np.array([0.75])).tolist()
    [2.5]
    """
    at = np.clip(fraction, 0.0, 1.0) * (knots.shape[1] - 1)
    low = np.minimum(at.astype(np.int64), knots.shape[1] - 2)
    pick = np.arange(len(knots))
    return np.asarray(knots[pick, low] + (at - low) * (knots[pick, low + 1] - knots[pick, low]))


@dataclass(frozen=True, slots=True)
class Generalisation:
    """Test accuracy from progress: best - (best - chance) exp(-rate * fraction), less a penalty for large batches.

    This model is ours, not a paper's. The saturating exponential is the commonest shape of accuracy curves. The
    penalty, `per_octave` for every doubling of the mean log2 batch above `free` samples, represents the generalisation
    gap (Keskar et al. 2017), whose size depends on the task.
    """

    chance: float = 0.1
    best: float = 0.93
    rate: float = 6.0
    free: float = 1024.0
    per_octave: float = 0.01

    def accuracy(self, fraction: Floats, mean_log2_batch: Floats) -> Floats:
        """(C,) accuracies after `fraction` (C,) of a training whose log2 global batch averaged `mean_log2_batch`.

        >>> model = Generalisation()
        >>> bool(model.accuracy(np.array(1.0), np.array(12.0)) < model.accuracy(np.array(1.0), np.array(10.0)))
        True
        """
        reached = self.best - (self.best - self.chance) * np.exp(-self.rate * np.maximum(fraction, 0.0))
        penalty = self.per_octave * np.maximum(mean_log2_batch - np.log2(self.free), 0.0)
        return np.asarray(np.maximum(reached - penalty, self.chance))
