"""What learners share: a network, its optimizer, a random generator of their own, and exact resume."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dynamix.training.distributions import Head


class Learner:
    """Learns the weights of `net`, whose outputs `head` reads. Global random state neither matters nor moves.

    `state_dict` holds weights, optimizer and generator: stopping and resuming gives bit-identical weights.
    """

    def __init__(self, net: nn.Module, head: Head, *, learning_rate: float, seed: int) -> None:
        self.net, self.head = net, head
        self.optimizer = torch.optim.Adam(net.parameters(), lr=learning_rate, eps=1e-5)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def act(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the workers' actions (N, W, ...) and the clusters' (N, G)."""
        return self.head(self.net, observed, mask)[0].sample(self.generator)

    def choose(self, observed: Tensor, mask: Tensor) -> Tensor:
        """Sample the workers' actions (N, W, ...) alone."""
        return self.act(observed, mask)[0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": {name: value.clone() for name, value in self.net.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.generator.set_state(state["generator"])
