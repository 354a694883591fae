"""Learners learn from these: decisions in simulated clusters and what each led to."""

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
    """T decisions in each of N clusters of W workers. NaN rewards are left out of learning.

    observed, mask  (T, N, W, F) and (T, N, W) bool, workers that took part
    chosen          (T, N, W) index of each worker's action, or (T, N, W, L) real actions
    reward          (T, N) of the window that followed
    duration        (T, N) of that window, in the time that discounts count: seconds, or 1 for each decision
    final_observed, final_mask   (N, W, F) and (N, W) after the last window
    shared          (T, N, G) the clusters' own actions; None: they have none
    done            (T, N) bool, whether the episode ended with that window; None: it never did
    at_once         (T, N, W) and (T, N) what each worker's and the cluster's own action did to the reward of its
                    window, where that is known; the learner then asks the rewards only for what came later
    acted           (T, N, W) bool, who of the mask did what was chosen for them; None: all. Only they learn to act
    evaluated       log-probabilities (T, N, W) and (T, N) and values (T + 1, N) as they were when the actions were
                    taken; None: the learner evaluates the episode when it begins to learn from it
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
    """Over windows, clusters and episodes; unknown rewards count nothing."""
    return float(torch.cat([episode.reward.flatten() for episode in episodes]).nanmean())


@torch.no_grad()
def play(
    env: ClusterEnv, policy: AdditivePolicy, choose: Choice, reward: Reward, window: Window, windows: int
) -> Episode:
    """`windows` decisions in every cluster of `env`, the first one on `window`; `choose` samples the actions."""
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
