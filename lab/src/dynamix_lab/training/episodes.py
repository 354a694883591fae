"""Episodes for learners: decisions in simulated clusters, and their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dynamix.window import Window
from dynamix_lab.papers.additive import AdditivePolicy
from dynamix_lab.simulator import ClusterEnv
from dynamix_lab.training.rewards import Reward

Choice = Callable[[Tensor, Tensor], Tensor]  # (observed, mask) to actions
LARGEST_REWARD = 2.0  # a lost measurement or a stall must not outweigh a whole episode


@dataclass(slots=True)
class Episode:
    """T decisions in each of N clusters of W workers. Learners skip decisions with a NaN reward.

    observed, mask  (T, N, W, F) and (T, N, W) bool, the workers that took part
    chosen          (T, N, W) index of each worker's action, or (T, N, W, L) real actions
    reward          (T, N) of the window after the decision
    duration        (T, N) of that window, in the unit of the discount: seconds, or 1 per decision
    final_observed, final_mask   (N, W, F) and (N, W) after the last window
    shared          (T, N, G) the clusters' own actions; None: there are none
    done            (T, N) bool, whether the episode ended with that window; None: it never ended
    at_once         (T, N, W) and (T, N), the effect of each worker's and of the cluster's own action on the reward of
                    its window; the learner then takes only later effects from the rewards. None: not computed
    acted           (T, N, W) bool, workers of the mask whose chosen action was taken; None: all. Only they learn to act
    evaluated       log-probabilities (T, N, W) and (T, N) and values (T + 1, N) at the time of the actions; None: the
                    learner evaluates the episode before it learns from it
    """

    observed: Tensor
    mask: Tensor
    chosen: Tensor
    reward: Tensor
    duration: Tensor
    final_observed: Tensor
    final_mask: Tensor
    shared: Tensor | None = None
    done: Tensor | None = None
    at_once: tuple[Tensor, Tensor] | None = None
    acted: Tensor | None = None
    evaluated: tuple[Tensor, Tensor, Tensor] | None = None


def mean_reward(episodes: Sequence[Episode]) -> float:
    """The mean reward over windows, clusters and episodes, without NaN."""
    return float(torch.cat([episode.reward.flatten() for episode in episodes]).nanmean())


@torch.no_grad()
def play(
    env: ClusterEnv, policy: AdditivePolicy, choose: Choice, reward: Reward, window: Window, windows: int
) -> Episode:
    """Make `windows` decisions in every cluster of `env`, the first on `window`. `choose` samples the actions."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    paid, lasted = [], []
    for _ in range(windows):
        observed, mask = torch.from_numpy(policy.observe(window)), torch.from_numpy(window.batch_size > 0)
        chosen = choose(observed, mask)
        rows.append((observed, mask, chosen))
        began = env.clock_s
        window = env.step(policy.allocate(window, env.bounds, chosen.numpy()))
        lasted.append(env.clock_s - began)
        paid.append(np.clip(reward.update(window), -LARGEST_REWARD, LARGEST_REWARD))
    observed, mask, chosen = (torch.stack(part) for part in zip(*rows, strict=True))
    rewards, duration = (torch.from_numpy(np.array(values)).float() for values in (paid, lasted))
    final = torch.from_numpy(policy.observe(window)), torch.from_numpy(window.batch_size > 0)
    return Episode(observed, mask, chosen, rewards, duration, *final)
