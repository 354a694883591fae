"""The base of learners: a network, its optimizer, its own random generator, and exact resume."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dynamix_lab.training.distributions import Head


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Train on one core: the order of sums, and so the weights, must not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def descend(net: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float = 1.0) -> None:
    """Make one gradient step, with the gradient's norm limited to `max_norm`."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
    optimizer.step()


class Learner:
    """Learns the weights of `net`, whose outputs `head` reads. It neither uses nor changes global random state.

    `state_dict` has weights, optimizer and generator, so that stopping and resuming gives bit-identical weights.
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
        """Sample only the workers' actions (N, W, ...)."""
        return self.act(observed, mask)[0]

    def state_dict(self) -> dict[str, Any]:
        weights = {name: value.clone() for name, value in self.net.state_dict().items()}
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        return {"net": weights, "optimizer": optimizer, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.generator.set_state(state["generator"])
