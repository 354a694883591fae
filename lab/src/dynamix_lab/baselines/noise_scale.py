"""A global batch that follows the gradient noise scale."""

from typing import Any

import numpy as np

from dynamix.model.measured import noise_scale
from dynamix.model.running import Smoothed
from dynamix.model.state import restored, saved
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window


class NoiseScalePolicy:
    """Equal shares of a global batch that follows the smoothed gradient noise scale, by at most `step` per decision.

    The adaptive batch size of KungFu (Mai et al., OSDI 2020, no arXiv entry), with the noise scale of McCandlish et al.
    (arXiv 1812.06162). B = noise scale balances the number of steps and of samples. Speeds have no effect.

    >>> policy = NoiseScalePolicy()
    >>> policy.decide(Window.of([32, 32], noise=96.0, signal=1.0), Bounds.of(2)).tolist()
    [48, 48]
    """

    even = True

    def __init__(self, *, weight: float = 0.1, step: float = 2.0) -> None:
        self.step = step
        self.scale = Smoothed(weight)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        self.scale = self.scale.update(noise_scale(window))
        phi, now = self.scale.value, window.batch_size.sum(-1).astype(np.float64)
        total = np.where(np.isnan(phi), now, np.clip(phi, now / self.step, now * self.step))
        return project(np.ones(window.batch_size.shape), bounds, total=total, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return saved(self.scale)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = restored(self.scale, state)
