"""PPO for the paper's discrete actions: the clipped surrogate summed over workers, a central critic, GAE.

Same episodes and network as `simplified.py`, which leaves all of this out. (`ppo.py` is the learner for the real-valued
share/global action.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynamix.training.simplified import Episode, Simplified, SimplifiedConfig, mean_reward


@dataclass(frozen=True, slots=True)
class ClippedConfig(SimplifiedConfig):
    """Defaults of the clip and of GAE follow Schulman et al. 2017 and 2016.

    rows   workers times windows in one gradient step
    """

    learning_rate: float = 5e-4
    discount_per_s: float = 0.8
    entropy_weight: float = 0.002
    max_gradient_norm: float = 1.0
    gae_lambda: float = 0.9
    clip: float = 0.2
    epochs: int = 3
    rows: int = 4096
    value_weight: float = 0.5


class Clipped(Simplified):
    """Learner around a network that maps (N, W, F) and (N, W) to logits (N, W, A) and the team's value (N,)."""

    config: ClippedConfig

    def __init__(self, net: nn.Module, config: ClippedConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(net, config or ClippedConfig(), seed=seed)

    def update(self, episodes: list[Episode]) -> dict[str, float]:
        """Some epochs of gradient steps on whole episodes, which may differ in W."""
        flats = [self._flatten(episode) for episode in episodes]
        totals, steps = {"policy": 0.0, "value": 0.0, "entropy": 0.0}, 0
        for _ in range(self.config.epochs):
            work = [(flat, rows) for flat in flats for rows in self._parts(flat)]
            for i in torch.randperm(len(work), generator=self.generator).tolist():
                flat, rows = work[i]
                losses = self._losses({name: tensor[rows] for name, tensor in flat.items()})
                loss = losses["policy"] + self.config.value_weight * losses["value"]
                self.optimizer.zero_grad(set_to_none=True)
                (loss - self.config.entropy_weight * losses["entropy"]).backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), self.config.max_gradient_norm)
                self.optimizer.step()
                steps += 1
                for name, value in losses.items():
                    totals[name] += float(value.detach())
        means = {name: value / max(steps, 1) for name, value in totals.items()}
        return {**means, "reward": mean_reward(episodes)}

    @torch.no_grad()
    def advantages(self, episode: Episode) -> tuple[Tensor, Tensor]:
        """Generalised advantage estimates and values, (T, N); the discount is per second of each window."""
        windows = len(episode.reward)
        values = self.net(episode.observed.flatten(0, 1), episode.mask.flatten(0, 1))[1].view(windows, -1)
        following = torch.cat([values[1:], self.net(episode.final_observed, episode.final_mask)[1][None]])
        discount = self.config.discount_per_s**episode.seconds
        surprise = episode.reward + discount * following - values
        advantage, running = torch.zeros_like(surprise), torch.zeros_like(surprise[0])
        for t in reversed(range(windows)):
            running = torch.nan_to_num(surprise[t]) + discount[t] * self.config.gae_lambda * running
            advantage[t] = running
        return advantage, values

    @torch.no_grad()
    def _flatten(self, episode: Episode) -> dict[str, Tensor]:
        advantage, values = self.advantages(episode)
        names = ("observed", "mask", "chosen")
        flat = {name: getattr(episode, name).flatten(0, 1) for name in names}
        flat |= {"advantage": advantage.flatten(), "returns": (advantage + values).flatten()}
        flat["log_taken"] = self._log_taken(flat)[0]
        known = torch.isfinite(episode.reward).flatten()
        return {name: tensor[known] for name, tensor in flat.items()}

    def _parts(self, flat: dict[str, Tensor]) -> list[Tensor]:
        count, workers = flat["chosen"].shape
        order = torch.randperm(count, generator=self.generator)
        return [part for part in order.split(max(self.config.rows // workers, 8)) if len(part) > 1]

    def _log_taken(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of what was chosen (N, W), entropies (N, W), values (N,)."""
        logits, value = self.net(batch["observed"], batch["mask"])
        log_all = logits.log_softmax(-1)
        taken = log_all.gather(-1, batch["chosen"].unsqueeze(-1)).squeeze(-1)
        return taken * batch["mask"], -(log_all.exp() * log_all).sum(-1) * batch["mask"], value

    def _losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        taken, entropy, value = self._log_taken(batch)
        advantage = batch["advantage"]
        advantage = ((advantage - advantage.mean()) / (advantage.std() + 1e-8))[:, None]
        ratio = (taken - batch["log_taken"]).exp()
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage) * batch["mask"]
        return {
            "policy": -gain.sum(-1).mean(),
            "value": (batch["returns"] - value).square().mean(),
            "entropy": entropy.sum() / batch["mask"].sum().clamp(min=1),
        }
