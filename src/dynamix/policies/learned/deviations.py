"""Deviations from a policy's answer, by which it learns on a job: what they may be, and what is noted of one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dynamix.errors import ConfigError
from dynamix.window import Floats, Ints

MOST_SHARE_SD, MOST_GLOBAL_SD, MOST_LOSS = 0.03, 0.10, 0.01


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """Settings of learning on a real job; all ours. Raises `ConfigError` beyond the limits that users rely on."""

    share_sd: float = 0.03  # standard deviation of a deviation of log share, at most 0.03
    global_sd: float = 0.10  # the same of log global batch, at most 0.10
    # Fraction of the job's time that deviations may be expected to cost, at most 0.01; when it is spent, nothing is
    # tried until time has gone by.
    max_loss: float = 0.01
    kl_limit: float = 0.5  # nats, mean per worker, that the policy may move from the one loaded
    learning_rate: float = 3e-4
    clip: float = 0.2
    memory: int = 32  # newest deviations learned from, at most
    rows: int = 2048  # workers times windows of a gradient step, at most
    # Seconds of training between gradient steps, at least: a step costs some milliseconds of rank 0, beside training.
    # Counted in the windows' own time, so that a resumed job does the same.
    every_s: float = 1.0
    warm_up: int = 5  # windows before the first deviation: the model that prices them must be fitted
    draws: int = 8  # deviations whose mean price is the expected loss of one

    def __post_init__(self) -> None:
        limits = {"share_sd": MOST_SHARE_SD, "global_sd": MOST_GLOBAL_SD, "max_loss": MOST_LOSS}
        for name, most in limits.items():
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(name, getattr(self, name), f"0 to {most}", "0 tries nothing")
        for entry in fields(self):
            if entry.name not in limits and not getattr(self, entry.name) > 0:
                raise ConfigError(entry.name, getattr(self, entry.name), "more than 0", "see LiveConfig")


@dataclass(slots=True)
class DeviationTrial:
    """A deviation from the policy's answer in N clusters of W workers, and what it was worth against that answer."""

    observed: Tensor  # (N, W, F)
    mask: Tensor  # (N, W)
    share: Tensor  # (N, W) deviation of log share, 0 where none was tried
    growth: Tensor  # (N,) of log global batch
    mean_share: Tensor  # (N, W) the policy's mean at that time
    mean_growth: Tensor  # (N,)
    worth: Tensor  # (N,) log goodput less what was expected of the policy's own answer; NaN until known

    def state_dict(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name).clone() for entry in fields(self)}


@dataclass(slots=True)
class Pending:
    """What is needed to judge a trial when its window has ended."""

    trial: DeviationTrial
    sizes: Ints  # (N, W) answered
    total: Floats  # (N,) of the policy's own answer
    log_step: Floats  # (N,) expected of it

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).tolist() for name in ("sizes", "total", "log_step")}
        return {"trial": self.trial.state_dict(), **arrays}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Pending:
        """The inverse of `state_dict`."""
        total, log_step = (np.asarray(state[name], np.float64) for name in ("total", "log_step"))
        return cls(DeviationTrial(**state["trial"]), np.asarray(state["sizes"], np.int64), total, log_step)


def means(net: nn.Module, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The network's mean action: log share (N, W) with zero mean, log global growth (N,)."""
    if (own := getattr(net, "mean_action", None)) is not None:
        share, growth = own(observed, mask)
    else:
        local, shared, *_ = net(observed, mask)
        share, growth = local.squeeze(-1), shared.squeeze(-1)
    mean = (share * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (share - mean) * mask, growth


def log_ratio(moved: Tensor, deviation: Tensor, sd: float) -> Tensor:
    """log of the density of `deviation` after the mean moved by `moved`, over that before; normal with this sd."""
    return (2 * deviation * moved - moved.square()) / (2 * max(sd, 1e-6) ** 2)


def deviated(greedy: Floats, draws: NDArray[Any], of_share: bool) -> Floats:
    """Real sizes (N, K, W): shares changed at the same sum, or all sizes by one factor."""
    wished = greedy * np.exp(draws)
    if of_share:
        wished = wished * greedy.sum(-1, keepdims=True) / np.maximum(wished.sum(-1, keepdims=True), 1e-9)
    return np.asarray(wished)
