"""Models whose gradients are largely zero: collaborative filtering, tied embeddings, experts, adapters.

A tied embedding is input and output in one table. With a full softmax its gradient has no zeros. With a sampled softmax
(Jean et al., arXiv 1412.2007) only the rows of the batch's words and of the sampled words are nonzero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamix_lab.tasks.sequence import Block, Transformer


class NeuralFilter(nn.Module):
    """Whether a user takes an item, after NeuMF (He et al., arXiv 1708.05031); inputs (n, 2) int64, logits (n,).

    A linear layer combines the product of the two embeddings and a perceptron on both. Both parts use the same table
    for each side.
    """

    def __init__(self, *, users: int, items: int, factors: int, sparse: bool = False) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(n, factors, sparse=sparse) for n in (users, items))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(2 * factors, 2 * factors), nn.ReLU(), nn.Linear(2 * factors, factors))
        self.out = nn.Linear(2 * factors, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        together = torch.cat([user * item, self.mlp(torch.cat([user, item], 1))], 1)
        logits: Tensor = self.out(together).squeeze(1)
        return logits


class TiedLanguageModel(nn.Module):
    """Next words by a sampled softmax, with input and output words in one table.

    body     from (n, length, width) to the same shape
    length   of the text: inputs are (n, length + 1 + k) int64, the words and then the k sampled words for the whole
             batch (row 0 is used)

    Returns logits (n * length, 1 + k), the right word first. The log of each word's sampling rate is subtracted, so
    that on average the softmax is that over all words. Words are numbered by falling frequency.
    """

    def __init__(self, words: int, width: int, length: int, body: Callable[[], nn.Module], *, sparse: bool) -> None:
        super().__init__()
        self.words, self.length = words, length
        self.table = nn.Embedding(words, width, sparse=sparse)
        nn.init.normal_(self.table.weight, std=0.05)
        self.body = body()

    def forward(self, x: Tensor) -> Tensor:
        length = self.length
        hidden = self.body(self.table(x[:, :length]))
        hidden = hidden.reshape(-1, hidden.shape[-1])
        right, drawn = x[:, 1 : length + 1].reshape(-1), x[0, length + 1 :]
        score = (hidden * self.table(right)).sum(1, keepdim=True) - self._log_chance(right, drawn.numel()).unsqueeze(1)
        others = hidden @ self.table(drawn).T - self._log_chance(drawn, drawn.numel())
        others = others.masked_fill(drawn == right.unsqueeze(1), -1e9)
        return torch.cat([score, others], 1)

    def _log_chance(self, words: Tensor, drawn: int) -> Tensor:
        """Logarithm of the expected count of each word among `drawn` sampled ones."""
        return torch.log(drawn * torch.log1p(1 / (words + 1.0)) / math.log(self.words + 1))


class LstmBody(nn.Module):
    """One layer, as wide as its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(x)[0]
        return hidden


class AttentionBody(nn.Module):
    """One block of a causal transformer, with learned positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(length, width))
        nn.init.normal_(self.position, std=0.02)
        self.block, self.norm = Block(width, heads=4), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.block(x + self.position[: x.shape[1]]))
        return hidden


class Experts(nn.Module):
    """A classifier with one layer of experts, one for each sample (Switch, Fedus et al., arXiv 2101.03961).

    inputs (n, width), logits (n, classes). Experts without a sample have no gradient: a block of zeros in each of two
    parameters of shape (experts, ...). The experts' load is not balanced.
    """

    def __init__(self, *, experts: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.into = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(width))
        self.back = nn.Parameter(torch.randn(experts, hidden, width) / math.sqrt(hidden))
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        chance = self.router(x).softmax(1)
        gate, expert = chance.max(1)
        hidden = F.relu(torch.bmm(x.unsqueeze(1), self.into[expert]))
        added = torch.bmm(hidden, self.back[expert]).squeeze(1)
        logits: Tensor = self.out(x + gate.unsqueeze(1) * added)
        return logits


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two thin matrices (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return out


def adapted_transformer(*, tokens: int, context: int, width: int, layers: int, rank: int) -> Transformer:
    """A transformer in which only adapters on the linear layers of its blocks are trained."""
    net = Transformer(tokens=tokens, context=context, width=width, layers=layers).requires_grad_(False)
    for block in net.blocks:
        assert isinstance(block, Block)
        block.queries_keys_values = Adapted(block.queries_keys_values, rank)  # type: ignore[assignment]
        block.project = Adapted(block.project, rank)  # type: ignore[assignment]
        for place, layer in enumerate(block.mlp):
            if isinstance(layer, nn.Linear):
                block.mlp[place] = Adapted(layer, rank)
    return net
