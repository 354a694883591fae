"""Training whose every bucket is reduced in dense fixed point as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamix.compression import CompressionState, compression_hook


class Copied:
    """A bucket again, so that another state can reduce it."""

    def __init__(self, bucket: Any) -> None:
        self._flat, self.index, self.parameters = bucket.buffer().clone(), bucket.index, bucket.parameters
        self.is_last = bucket.is_last

    def buffer(self) -> Tensor:
        return self._flat


def beside_fixed(
    net: Any, state: CompressionState, equal: list[bool], due: Callable[[], bool] = lambda: True
) -> Callable[[Any, Any], Any]:
    """A hook that reduces with `state` and notes, where it is due, whether fixed point gives the same bits."""
    fixed = CompressionState("fixed", model=net)

    def hook(_: Any, bucket: Any) -> Any:
        if not due():
            return compression_hook(state, bucket)
        wanted = fixed.reduce(Copied(bucket))  # type: ignore[arg-type]

        def compare(found: Any) -> Tensor:
            value: Tensor = found.value()
            equal.append(torch.equal(value, wanted.wait()))
            return value

        return compression_hook(state, bucket).then(compare)

    hook.__annotations__.clear()
    return hook


class Net(nn.Module):
    """An embedding with mostly zero gradients under layers without any zeros, every one a bucket; it learns means."""

    def __init__(self, layers: int = 3, words: int = 300) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.table(words).mean(1)
        for layer in self.layers:
            out = out + torch.tanh(layer(out))
        return out


def trained(net: Net, model: Any, rank: int, steps: int) -> Iterator[float]:
    """The loss of each step, which is done then."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        words = words_of(rank, step)
        loss = F.mse_loss(model(words), (words.float().mean(1, keepdim=True) / 300).expand(-1, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def words_of(rank: int, step: int, words: int = 300) -> Tensor:
    """A batch of four samples of three words."""
    return torch.randint(0, words, (4, 3), generator=torch.Generator().manual_seed(1000 * step + rank))
