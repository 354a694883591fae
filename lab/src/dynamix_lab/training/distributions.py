"""Distributions of actions, given a policy network's outputs, for N clusters of W workers.

Every worker has its own action. A cluster may have one more, which all workers share ("shared", (N, G); G is 0 if there
is none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Normal


class ActionDistribution(Protocol):
    """Actions (N, W, ...) of the workers and (N, G) of the clusters. Masks (N, W) mark the existing workers."""

    def sample(self, generator: torch.Generator, /) -> tuple[Tensor, Tensor]:
        """Actions of the workers and of the clusters."""

    def log_prob(self, chosen: Tensor, shared: Tensor, /) -> tuple[Tensor, Tensor]:
        """Log-probabilities of actions: (N, W) and (N,)."""

    def entropy(self, mask: Tensor, /) -> Tensor:
        """The entropy for an entropy bonus, a scalar."""

    def distance(self, other: Any, mask: Tensor, /) -> Tensor:
        """The distance (N,) from another distribution of the kind, which gets no gradient."""


Head = Callable[[nn.Module, Tensor, Tensor], tuple[ActionDistribution, Tensor]]
"""Maps a network, observations (N, W, F) and masks (N, W) to the distribution of actions and values (N,)."""


class Categorical:
    """One of A actions for every worker, from logits (N, W, A); no shared action."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.log_all = logits, logits.log_softmax(-1)

    def sample(self, generator: torch.Generator, /) -> tuple[Tensor, Tensor]:
        """Indices (N, W) by the Gumbel maximum."""
        uniform = torch.rand(self.logits.shape, generator=generator).clamp(min=1e-20)
        chosen = (self.logits - torch.log(-torch.log(uniform))).argmax(-1)
        return chosen, self.logits.new_zeros(len(chosen), 0)

    def log_prob(self, chosen: Tensor, shared: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        taken = self.log_all.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        return taken, taken.new_zeros(len(taken))

    def entropy(self, mask: Tensor, /) -> Tensor:
        """Mean over workers, in nats."""
        each = -(self.log_all.exp() * self.log_all).sum(-1) * mask
        return each.sum() / mask.sum().clamp(min=1)

    def distance(self, other: Categorical, mask: Tensor, /) -> Tensor:
        """Kullback-Leibler divergence from the other's actions, summed over workers."""
        others = other.log_all.detach()
        return ((others.exp() * (others - self.log_all)).sum(-1) * mask).sum(-1)


class Gaussian:
    """Real actions (N, W, L) and (N, G) with means, and standard deviations (L,) and (G,) that all states share."""

    def __init__(self, local: Tensor, shared: Tensor, log_std_local: Tensor, log_std_shared: Tensor) -> None:
        self.local, self.shared = local, shared
        self.std_local, self.std_shared = log_std_local.exp(), log_std_shared.exp()

    def sample(self, generator: torch.Generator, /) -> tuple[Tensor, Tensor]:
        local = self.local + self.std_local * torch.randn(self.local.shape, generator=generator)
        return local, self.shared + self.std_shared * torch.randn(self.shared.shape, generator=generator)

    def log_prob(self, chosen: Tensor, shared: Tensor, /) -> tuple[Tensor, Tensor]:
        log_local = Normal(self.local, self.std_local).log_prob(chosen).sum(-1)
        return log_local, Normal(self.shared, self.std_shared).log_prob(shared).sum(-1)

    def entropy(self, mask: Tensor, /) -> Tensor:
        """Summed over the actions' components, up to a constant."""
        return self.std_local.log().sum() + self.std_shared.log().sum()

    def distance(self, other: Gaussian, mask: Tensor, /) -> Tensor:
        """Squared distance of the means, in units of this one's standard deviations, summed over workers."""
        local = ((self.local - other.local.detach()) / self.std_local.detach()) ** 2
        shared = ((self.shared - other.shared.detach()) / self.std_shared.detach()) ** 2
        return local.sum(-1).mul(mask).sum(-1) + shared.sum(-1)


def categorical(net: nn.Module, observed: Tensor, mask: Tensor) -> tuple[Categorical, Tensor]:
    """`Head` of networks that return logits (N, W, A) and values (N,)."""
    logits, value = net(observed, mask)
    return Categorical(logits), value


def gaussian(net: nn.Module, observed: Tensor, mask: Tensor) -> tuple[Gaussian, Tensor]:
    """`Head` of networks that return means (N, W, L), (N, G) and values (N,) and have `log_std_local`, `_shared`."""
    local, shared, value = net(observed, mask)
    log_std_local, log_std_shared = net.get_parameter("log_std_local"), net.get_parameter("log_std_shared")
    return Gaussian(local, shared, log_std_local, log_std_shared), value
