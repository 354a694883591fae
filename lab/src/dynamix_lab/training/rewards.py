"""Rewards of a learner: the paper's forms for SGD and Adam-like optimisers, and regret (our default).

`update` is called once per window, in order; learners skip a window if it returns NaN. The paper's form uses only
measurements of a job; the simulated ones know the world.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from dynamix.errors import ConfigError
from dynamix.model.measured import step_seconds
from dynamix.window import Floats, Window
from dynamix_lab.simulator import ClusterEnv, Generalisation, LaggedReference, rollout
from dynamix_lab.simulator.env import AnswersWindows

Optimizer = Literal["sgd", "adam"]
LARGEST_SIGMA = 10.0  # an unmeasurable signal makes sigma_norm infinite, but a reward must be finite


class Reward(Protocol):
    """The reward (...) of the window that just ended."""

    def update(self, window: Window, /) -> Floats: ...


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """Weights of the paper's terms; the sources give none, so all are ours.

    accuracy      a gain of one accuracy point in a window equals one reference iteration time at 100
    time          of -T_iter / T_ref
    retransmits   of -(retransmits per second, mean over workers)
    sigma         of -sigma_norm (Adam only)
    """

    accuracy: float = 100.0
    time: float = 1.0
    retransmits: float = 0.01
    sigma: float = 0.1


class PaperReward:
    """DYNAMIX (arXiv 2510.08522): generalisation, speed, gradient stability. The form is second-hand, weights are ours.

    SGD:  r = w_acc dA - w_time T_iter/T_ref - w_retx retx;  Adam: the same - w_sigma sigma_norm. dA is the change of
    batch accuracy since the last window (of test accuracy if `update` is given it), and T_ref the first window's
    iteration time. `sigma_norm` is that of the applied gradient, unlike the state's, because an action cannot change tr
    Sigma. A figure that is not measured counts as 0, except the iteration time.

    >>> reward = PaperReward("sgd", RewardWeights(accuracy=10.0))
    >>> float(reward.update(Window.of([8, 8], compute=1.0, accuracy=0.5)))
    -1.0
    >>> round(float(reward.update(Window.of([8, 8], compute=0.5, accuracy=0.6))), 6)
    0.5
    """

    def __init__(self, optimizer: Optimizer = "sgd", weights: RewardWeights | None = None) -> None:
        if optimizer not in ("sgd", "adam"):
            raise ConfigError("optimizer", optimizer, "sgd, adam", "Adam-like optimisers (Adam, AdamW, LAMB) are adam")
        self.optimizer, self.weights = optimizer, weights or RewardWeights()
        self.reference_s: Floats | None = None
        self.accuracy: Floats | None = None

    def update(self, window: Window, /, *, accuracy: Floats | None = None) -> Floats:
        w, seconds = self.weights, step_seconds(window)
        reached = _mean_of_known(window.accuracy) if accuracy is None else accuracy
        if self.reference_s is None or self.reference_s.shape != seconds.shape or self.accuracy is None:
            self.reference_s, self.accuracy = seconds, reached
        self.reference_s = np.where(np.isnan(self.reference_s), seconds, self.reference_s)
        gained = np.nan_to_num(reached - self.accuracy)
        self.accuracy = np.where(np.isnan(reached), self.accuracy, reached)
        lost = np.nan_to_num(_mean_of_known(window.retransmits_per_s))
        reward = w.accuracy * gained - w.time * seconds / self.reference_s - w.retransmits * lost
        if self.optimizer == "adam":
            reward = reward - w.sigma * np.nan_to_num(sigma_norm(window))
        return np.asarray(reward)

    def state_dict(self) -> dict[str, Any]:
        kept = {"reference_s": self.reference_s, "accuracy": self.accuracy}
        return {name: None if value is None else value.tolist() for name, value in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("reference_s", "accuracy"):
            setattr(self, name, None if state[name] is None else np.asarray(state[name], np.float64))


class SimulatedRegret:
    """log(goodput / another's) in the same world. It needs a second environment, paired with the first.

    other   makes the policy that decides there; the default is the lagged reference
    """

    def __init__(
        self, env: ClusterEnv, paired: ClusterEnv, other: Callable[[ClusterEnv], AnswersWindows] = LaggedReference
    ) -> None:
        self.env, self.paired = env, paired
        self._twin = rollout(other(paired), paired)
        next(self._twin)  # its first window, before any decision
        self._before = self._totals()

    def update(self, window: Window, /) -> Floats:
        next(self._twin)
        before, self._before = self._before, self._totals()
        progress, seconds = self._before - before
        mine, theirs = np.log(progress / np.maximum(seconds, 1e-12))
        return np.asarray(mine - theirs)

    def _totals(self) -> Floats:
        """Progress and seconds (2, 2, C), of the environment and its pair."""
        return np.array([(env.progress, env.clock_s) for env in (self.env, self.paired)]).swapaxes(0, 1)


class SimulatedPaper:
    """The paper's reward with test accuracy from the simulator's model of generalisation."""

    def __init__(self, env: ClusterEnv, optimizer: Optimizer = "sgd", weights: RewardWeights | None = None) -> None:
        self.env, self.model, self.reward = env, Generalisation(), PaperReward(optimizer, weights)
        self.reward.accuracy = env.accuracy(self.model)
        self.reward.reference_s = np.full(self.reward.accuracy.shape, np.nan)

    def update(self, window: Window, /) -> Floats:
        return self.reward.update(window, accuracy=self.env.accuracy(self.model))


def sigma_norm(window: Window) -> Floats:
    """sqrt(tr Sigma / B) / |G|, (...): the applied gradient's standard deviation over its norm; NaN if unknown."""
    scale = window.noise_scale / np.maximum(window.global_batch, 1.0)
    return np.asarray(np.minimum(np.sqrt(scale), LARGEST_SIGMA))


def _mean_of_known(x: Floats) -> Floats:
    known = np.isfinite(x)
    count = known.sum(-1)
    return np.where(count > 0, np.where(known, x, 0.0).sum(-1) / np.maximum(count, 1), np.nan)
