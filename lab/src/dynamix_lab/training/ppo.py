"""Proximal policy optimisation for a team: any kind of action, variable W, masks, a central critic, exact resume.

The clipped surrogate (Schulman et al. 2017) is summed over workers: each worker's action has its own ratio, and all
share the team's advantage (GAE, Schulman et al. 2016). A cluster's shared action counts as one more agent. If an
episode has each action's immediate effect (`Episode.at_once`), this replaces the first reward in its advantage. The
advantage stays unbiased, because the omitted part does not depend on the action (Foerster et al. 2018).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynamix_lab.training.distributions import Head
from dynamix_lab.training.episodes import Episode, mean_reward
from dynamix_lab.training.learner import Learner, descend


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Defaults follow Schulman et al. 2017.

    gamma          discount per unit of an episode's `duration`: per decision, or per second
    minibatch      decisions per gradient step
    worker_rows    if given, replaces `minibatch`: workers times decisions per gradient step, of at least 8 decisions
    anchor_weight  weight in the loss of `ActionDistribution.distance` from `PPO.anchor`
    """

    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    epochs: int = 10
    minibatch: int = 64
    worker_rows: int | None = None
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    anchor_weight: float = 0.0
    max_gradient_norm: float = 0.5


class PPO(Learner):
    """Trains an actor-critic `net`; `head` (`categorical`, `gaussian`) reads its outputs."""

    def __init__(self, net: nn.Module, head: Head, config: PPOConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or PPOConfig()
        super().__init__(net, head, learning_rate=self.config.learning_rate, seed=seed)
        self.anchor: nn.Module | None = None

    def update(self, episodes: list[Episode]) -> dict[str, float]:
        """Make `epochs` passes over episodes, which may differ in W. Returns mean losses and reward, for the log."""
        flats = [self._flatten(episode) for episode in episodes]
        totals, steps = {"policy": 0.0, "value": 0.0, "entropy": 0.0}, 0
        for _ in range(self.config.epochs):
            work = [(flat, rows) for flat in flats for rows in self._minibatches(flat["mask"])]
            for i in torch.randperm(len(work), generator=self.generator).tolist():
                flat, rows = work[i]
                loss, parts = self._loss({name: tensor[rows] for name, tensor in flat.items()})
                descend(self.net, self.optimizer, loss, self.config.max_gradient_norm)
                steps += 1
                for name, value in parts.items():
                    totals[name] += float(value.detach())
        means = {name: value / max(steps, 1) for name, value in totals.items()}
        return {**means, "reward": mean_reward(episodes)}

    @torch.no_grad()
    def evaluate(self, observed: Tensor, mask: Tensor, chosen: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities (N, W) of workers' and (N,) of clusters' actions, and values (N,)."""
        actions, value = self.head(self.net, observed, mask)
        return *actions.log_prob(chosen, shared), value

    @torch.no_grad()
    def value(self, observed: Tensor, mask: Tensor) -> Tensor:
        """Values (N,)."""
        return self.head(self.net, observed, mask)[1]

    def advantages(self, episode: Episode, values: Tensor) -> Tensor:
        """Generalised advantage estimates (T, N), from values (T + 1, N)."""
        discount = self.config.gamma**episode.duration
        if episode.done is not None:
            discount = discount * ~episode.done
        surprise = torch.nan_to_num(episode.reward + discount * values[1:] - values[:-1])
        advantage, running = torch.zeros_like(surprise), torch.zeros_like(surprise[0])
        for t in reversed(range(len(surprise))):
            running = surprise[t] + discount[t] * self.config.gae_lambda * running
            advantage[t] = running
        return advantage

    @torch.no_grad()
    def _flatten(self, episode: Episode) -> dict[str, Tensor]:
        """Decisions (T * N, ...) with finite reward, their advantages, returns and log-probabilities of the actions."""
        shared = episode.shared if episode.shared is not None else episode.reward.new_zeros(*episode.reward.shape, 0)
        acted = episode.mask if episode.acted is None else episode.acted
        flat = {"observed": episode.observed, "mask": episode.mask, "chosen": episode.chosen, "shared": shared}
        flat["acted"] = acted
        flat = {name: tensor.flatten(0, 1) for name, tensor in flat.items()}
        if episode.evaluated is None:
            *logs, value = self.evaluate(flat["observed"], flat["mask"], flat["chosen"], flat["shared"])
            last = self.value(episode.final_observed, episode.final_mask)
            values = torch.cat([value.view(episode.reward.shape), last[None]])
        else:
            *logs, values = episode.evaluated
            logs = [log.flatten(0, 1) for log in logs]
        flat["log_chosen"], flat["log_shared"] = logs
        advantage = self.advantages(episode, values)
        flat |= {"returns": (advantage + values[:-1]).flatten(), "own": advantage.flatten()[:, None]}
        flat["common"] = advantage.flatten()
        if episode.at_once is not None:
            later = (advantage - episode.reward).flatten()
            own, common = (each.flatten(0, 1) for each in episode.at_once)
            flat |= {"own": own + later[:, None], "common": common + later}
        known = torch.isfinite(episode.reward).flatten()
        return {name: tensor[known] for name, tensor in flat.items()}

    def _minibatches(self, mask: Tensor) -> list[Tensor]:
        (decisions, workers), rows = mask.shape, self.config.worker_rows
        count = self.config.minibatch if rows is None else max(rows // workers, 8)
        order = torch.randperm(decisions, generator=self.generator)
        return [part for part in order.split(count) if len(part) > 1]

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        c, mask, acted = self.config, batch["mask"], batch["acted"]
        actions, value = self.head(self.net, batch["observed"], mask)
        log_chosen, log_shared = actions.log_prob(batch["chosen"], batch["shared"])
        own, common = _standardised(batch["own"]), _standardised(batch["common"])
        gain = (self._clipped((log_chosen - batch["log_chosen"]) * acted, own) * acted).sum(-1)
        if batch["shared"].shape[-1]:
            gain = gain + self._clipped(log_shared - batch["log_shared"], common)
        missed = (batch["returns"] - value).square().mean()
        parts = {"policy": -gain.mean(), "value": missed, "entropy": actions.entropy(acted)}
        loss = parts["policy"] + c.value_weight * parts["value"] - c.entropy_weight * parts["entropy"]
        if self.anchor is not None:
            with torch.no_grad():
                held, _ = self.head(self.anchor, batch["observed"], mask)
            loss = loss + c.anchor_weight * actions.distance(held, mask).mean()
        return loss, parts

    def _clipped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        ratio = log_ratio.exp()
        return torch.minimum(ratio * advantage, ratio.clamp(1 - self.config.clip, 1 + self.config.clip) * advantage)


def _standardised(advantage: Tensor) -> Tensor:
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)
