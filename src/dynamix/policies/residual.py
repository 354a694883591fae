"""What the learned policy remembers between windows: smoothed speeds, surprises, and how time grows with batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamix.policies.proportional import SpeedFilter
from dynamix.window import Floats, Window

OWN_FEATURES = (
    "surprise",       # newest log speed - smoothed log speed before this window
    "residue",        # newest log speed - smoothed log speed after this window
    "last_surprise",  # the previous window's
    "from_slow",      # smoothed log speed - its slow average: is this worker below its usual speed?
    "from_rule",      # log share - log share that LB-BSP would give
    "elasticity",     # d log(time) / d log(batch), fitted online over the cluster, global
    "pull",           # log(best global batch / current), affine model with that elasticity, global
    "peak_surprise",  # largest |surprise| of the cluster, global
)  # fmt: skip
# Before any change of batch was seen: 80 % of a worker's time grows with its batch. The prior weighs as much as this
# sum of squared log batch changes (noise of a window's mean time is of order 0.05).
PRIOR_ELASTICITY, PRIOR_WEIGHT, FORGET = 0.8, 0.3, 0.98


class Memory:
    """Per-worker and per-cluster memory for windows of shape (..., W)."""

    def __init__(self) -> None:
        self.filter = SpeedFilter()
        self.slow: Floats | None = None
        self.last_surprise: Floats | None = None
        self.last_log_batch: Floats | None = None
        self.last_log_time: Floats | None = None
        self.moments: Floats | None = None  # (2, ...): sums of squares and of products

    @property
    def speed(self) -> Floats:
        """Smoothed samples per second (..., W); NaN where never measured."""
        assert self.filter.log_speed is not None
        return np.asarray(np.exp(self.filter.log_speed))

    def update(self, window: Window) -> NDArray[np.float32]:
        """Take in a window; the own features (..., W, len(OWN_FEATURES)), finite, in [-3, 3]."""
        shape = window.batch_size.shape
        if self.filter.log_speed is not None and self.filter.log_speed.shape != shape:
            self.__init__()  # type: ignore[misc]  # another cluster: nothing remembered holds
        before = self.filter.log_speed
        with np.errstate(divide="ignore", invalid="ignore"):
            log_batch = np.log(window.batch_size.astype(np.float64))
            log_per_sample = np.log(window.seconds_per_sample)
        log_batch = np.where(np.isfinite(log_batch), log_batch, np.nan)
        seen = np.where(np.isfinite(log_per_sample), -log_per_sample, np.nan)
        log_time = log_batch - seen
        self.filter.update(window)
        smooth = self.filter.log_speed
        assert smooth is not None
        surprise = np.zeros(shape) if before is None else _known(seen - before)
        known = smooth if self.slow is None else np.where(np.isnan(self.slow), smooth, self.slow)
        self.slow = known + 0.05 * _known(smooth - known)
        last = np.zeros(shape) if self.last_surprise is None else self.last_surprise
        elasticity = self._fit(log_batch, log_time)
        pull = self._pull(window, elasticity)
        own = np.empty((*shape, len(OWN_FEATURES)))
        own[..., 0] = surprise
        own[..., 1] = seen - smooth
        own[..., 2] = last
        own[..., 3] = smooth - self.slow
        own[..., 4] = _centred(log_batch) - _centred(smooth)
        own[..., 5] = elasticity[..., None] - PRIOR_ELASTICITY
        own[..., 6] = pull[..., None]
        own[..., 7] = np.abs(surprise).max(-1, keepdims=True)
        self.last_surprise, self.last_log_batch, self.last_log_time = surprise, log_batch, log_time
        return np.clip(_known(own), -3.0, 3.0).astype(np.float32)

    def _fit(self, log_batch: Floats, log_time: Floats) -> Floats:
        """d log t / d log b over the cluster, from changes between windows; disturbed workers left out."""
        if self.moments is None or self.last_log_batch is None or self.last_log_time is None:
            self.moments = np.zeros((2, *log_batch.shape[:-1]))
        else:
            with np.errstate(invalid="ignore"):
                x, y = log_batch - self.last_log_batch, log_time - self.last_log_time
                usable = np.isfinite(x) & np.isfinite(y) & (np.abs(y - PRIOR_ELASTICITY * x) < 0.25)
            x, y = np.where(usable, x, 0.0), np.where(usable, y, 0.0)
            self.moments = FORGET * self.moments + np.stack([(x * x).sum(-1), (x * y).sum(-1)])
        squares, products = self.moments
        fitted = (products + PRIOR_ELASTICITY * PRIOR_WEIGHT) / (squares + PRIOR_WEIGHT)
        return np.asarray(np.clip(fitted, 0.2, 1.0))

    @staticmethod
    def _pull(window: Window, elasticity: Floats) -> Floats:
        """log(B* / B) where B* maximises goodput: with step time a + c*B and noise scale phi, B* = sqrt(phi * a / c).

        From d/dB log[B / (a + c B) / (phi + B)] = 0 (Pollux's goodput, PAPERS section 5).
        """
        slowest = np.where(np.isfinite(window.compute), window.compute, 0.0).max(-1)
        known = np.isfinite(window.communication)  # where known the same for all workers
        transfer = np.where(known, window.communication, 0.0).sum(-1) / np.maximum(known.sum(-1), 1)
        fixed, growing = transfer + (1 - elasticity) * slowest, elasticity * slowest
        with np.errstate(divide="ignore", invalid="ignore"):
            best = 0.5 * np.log(window.noise_scale / window.global_batch * fixed / growing)
        return np.asarray(np.where(np.isnan(best), 0.0, np.clip(best, -3.0, 3.0)))

    _FIELDS = ("slow", "last_surprise", "last_log_batch", "last_log_time", "moments")

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {name: _plain(getattr(self, name)) for name in self._FIELDS}
        return {"filter": self.filter.state_dict(), **saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filter.load_state_dict(state["filter"])
        for name in self._FIELDS:
            saved = state[name]
            setattr(self, name, None if saved is None else np.asarray(saved, dtype=np.float64))


def _plain(values: Floats | None) -> Any:
    return None if values is None else values.tolist()


def _known(x: Floats) -> Floats:
    return np.where(np.isfinite(x), x, 0.0)


def _centred(x: Floats) -> Floats:
    known = np.isfinite(x)
    mean = np.where(known, x, 0.0).sum(-1, keepdims=True) / np.maximum(known.sum(-1, keepdims=True), 1)
    return np.where(known, x - mean, np.nan)
