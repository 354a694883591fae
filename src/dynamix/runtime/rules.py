"""Learning-rate rules: how a learning rate follows the global batch."""

import math
from typing import Protocol

from torch.optim import Optimizer

from dynamix.errors import ConfigError, spelling


class Rule(Protocol):
    """The factor on the learning rate at `scale` = B / B0.

    noise        tr(Sigma), the variance of one sample's gradient summed over parameters; NaN if unknown
    signal       |G|^2 of the true gradient; NaN if unknown
    base_batch   B0, in samples
    room         0 to 1: how far `auto` may go beyond the square root of `scale`; 1: as far as the noise allows
    """

    def __call__(self, scale: float, noise: float, signal: float, *, base_batch: float, room: float = 1.0) -> float: ...


def adascale(scale: float, noise: float, signal: float, *, base_batch: float, room: float = 1.0) -> float:
    """The gain (S + G2) / (S / s + G2) of AdaScale SGD (Johnson et al., arXiv 2007.05105), s = B / B0.

    S = tr(Sigma) / B0 is the variance of the mean gradient of a base batch, G2 = |G|^2. The gain equals s times the
    statistical efficiency of B against B0: s if noise dominates, 1 if it does not matter. Estimates below zero count as
    zero. If they are unknown, the gain is its lowest possible value, min(1, s).

    >>> [adascale(4.0, noise=noise, signal=100.0, base_batch=64) for noise in (0.0, 6400.0)]  # the second: S = G2
    [1.0, 1.6]
    """
    variance, square = max(noise, 0.0) / base_batch, max(signal, 0.0)
    if not (math.isfinite(noise) and math.isfinite(signal)) or variance + square <= 0:
        return min(1.0, scale)
    return (variance + square) / (variance / scale + square)


def efficiency(total: float, base_batch: float, noise: float, signal: float) -> float:
    """What a sample teaches in a step of `total` samples, relative to a step of `base_batch`: AdaScale's gain / scale.

    1 if the noise is unknown.

    >>> efficiency(256, 64, noise=6400.0, signal=100.0), efficiency(256, 64, noise=math.nan, signal=math.nan)
    (0.4, 1.0)
    """
    if total == base_batch or not (math.isfinite(noise) and math.isfinite(signal)):
        return 1.0
    scale = total / base_batch
    return adascale(scale, noise, signal, base_batch=base_batch) / scale


NOISE_COUNTS = 4.0  # times: chosen on five SGD jobs; on five others equal to the root (docs/design/rates.md)


def gain(scale: float, noise: float, signal: float, *, base_batch: float, room: float = 1.0) -> float:
    """AdaScale's gain with the noise counted `NOISE_COUNTS` times; the square root of `scale` if noise is unknown.

    Without `room` it is at most the root: early in training, before the user's own rate has fallen, a much higher rate
    can ruin a network for good. If the batch is smaller than the base batch, the root is replaced by `scale`.

    >>> gain(4.0, noise=6400.0, signal=100.0, base_batch=64), gain(4.0, math.nan, math.nan, base_batch=64)
    (2.5, 2.0)
    """
    root = min(scale, math.sqrt(scale))
    if not (math.isfinite(noise) and math.isfinite(signal)):
        return root
    full = adascale(scale, NOISE_COUNTS * noise, signal, base_batch=base_batch)
    return min(full, root * math.pow(max(scale, 1.0) / root, room))


def root_of_gain(scale: float, noise: float, signal: float, *, base_batch: float, room: float = 1.0) -> float:
    """The square root of `gain`, for optimizers that divide by the size of the gradient."""
    return math.sqrt(gain(scale, noise, signal, base_batch=base_batch, room=room))


# linear: Goyal et al., arXiv 1706.02677, correct for SGD while noise dominates. sqrt: the usual rule for Adam; it keeps
# the variance of an update.
RULES: dict[str, Rule] = {
    "none": lambda scale, noise, signal, *, base_batch, room=1.0: 1.0,
    "linear": lambda scale, noise, signal, *, base_batch, room=1.0: scale,
    "sqrt": lambda scale, noise, signal, *, base_batch, room=1.0: math.sqrt(scale),
    "adascale": adascale,
}


AUTO = "auto"  # the gain; its root if the optimizer divides by the size of its gradients


def rule_of(name: str, optimizer: Optimizer | None = None) -> Rule:
    """The learning-rate rule of this name; "auto": the one for `optimizer`. Raises `ConfigError` for an unknown name.

    >>> rule_of("linear")(2.0, float("nan"), float("nan"), base_batch=64)
    2.0
    """
    if name == AUTO:
        # Adam and similar optimizers, Adagrad and RMSprop have these options; SGD does not. ZeroRedundancyOptimizer
        # keeps its arguments in its defaults, and those of its inner optimizer in its groups.
        known = set[str]() if optimizer is None else {*optimizer.defaults, *optimizer.param_groups[0]}
        return gain if known.isdisjoint(("eps", "betas")) else root_of_gain
    if name not in RULES:
        fix = f"'none' leaves the learning rate alone; {spelling(name, (AUTO, *RULES))}"
        raise ConfigError("lr_rule", name, ", ".join((AUTO, *RULES)), fix)
    return RULES[name]
