"""The paper's simplified learner in one file: cumulative reward, no clip, no advantage.

DYNAMIX (arXiv 2510.08522) describes PPO, but by third-party account its authors drop the clipped surrogate and the
advantage and update from cumulative reward. That is REINFORCE (Williams 1992) with reward-to-go and a categorical
policy per worker, learned in one place for all of them:

    grad J = E[ sum_t R_t  grad sum_i log pi(a_it | s_it, s_global,t) ],   R_t = r_t + d_t R_{t+1}

with the team's reward r and the discount d_t = discount_per_s ^ (seconds of window t).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynamix_lab.training.distributions import categorical
from dynamix_lab.training.episodes import Episode, mean_reward
from dynamix_lab.training.learner import Learner, descend


@dataclass(frozen=True, slots=True)
class SimplifiedConfig:
    """`discount_per_s` is ours: the paper's is per decision, which lasts 0.2 s in one job and 20 s in another."""

    learning_rate: float = 1e-3
    discount_per_s: float = 0.8
    entropy_weight: float = 0.0
    max_gradient_norm: float = 1.0


class Simplified(Learner):
    """Learner for a network that maps (N, W, F) and (N, W) to logits (N, W, A) and an output that is ignored."""

    def __init__(self, net: nn.Module, config: SimplifiedConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or SimplifiedConfig()
        super().__init__(net, categorical, learning_rate=self.config.learning_rate, seed=seed)

    def update(self, episodes: list[Episode]) -> dict[str, float]:
        """One gradient step on whole episodes, which may differ in W."""
        gain, entropy = torch.zeros(()), torch.zeros(())
        for episode in episodes:
            mask, known = episode.mask.flatten(0, 1), torch.isfinite(episode.reward).flatten()
            actions, _ = categorical(self.net, episode.observed.flatten(0, 1), mask)
            log_taken = actions.log_prob(episode.chosen.flatten(0, 1))[0] * mask
            worth = reward_to_go(episode.reward, episode.duration, self.config.discount_per_s).flatten()
            gain = gain + (worth * log_taken.sum(-1))[known].mean() / len(episodes)
            entropy = entropy + actions.entropy(mask) / len(episodes)
        loss = -gain - self.config.entropy_weight * entropy
        descend(self.net, self.optimizer, loss, self.config.max_gradient_norm)
        return {"gain": float(gain.detach()), "entropy": float(entropy.detach()), "reward": mean_reward(episodes)}


def reward_to_go(reward: Tensor, seconds: Tensor, discount_per_s: float) -> Tensor:
    """Discounted sum (T, N) of each window's reward and all later ones; unknown rewards count as 0.

    >>> two = torch.tensor([[1.0], [8.0]])
    >>> reward_to_go(two, torch.tensor([[3.0], [1.0]]), 0.5).flatten().tolist()        # 1 + 0.5^3 * 8
    [2.0, 8.0]
    """
    worth, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        running = torch.nan_to_num(reward[t]) + discount_per_s ** seconds[t] * running
        worth[t] = running
    return worth
