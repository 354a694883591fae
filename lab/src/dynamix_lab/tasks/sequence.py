"""Next-token models: a small causal transformer and an LSTM. Logits are (n, tokens, length), as cross_entropy needs
them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamix.errors import ConfigError


class Transformer(nn.Module):
    """Decoder-only transformer with pre-norm blocks and learned positions (Radford et al. 2019), without dropout.

    tokens    size of the vocabulary
    context   longest sequence

    >>> Transformer(tokens=256, context=16, width=32, layers=1)(torch.zeros(2, 10, dtype=torch.int64)).shape
    torch.Size([2, 256, 10])
    """

    def __init__(self, *, tokens: int, context: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError("width", width, f"a multiple of heads={heads}", "change one of them")
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, tokens)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(x) + self.position[: x.shape[1]])
        logits: Tensor = self.out(self.norm(hidden))
        return logits.transpose(1, 2)


class Block(nn.Module):
    """Causal self-attention and a perceptron, each on the normalised sum of all previous outputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        mixed = self.queries_keys_values(self.before_attention(x))
        q, k, v = mixed.view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(n, length, width))
        added: Tensor = x + self.mlp(self.before_mlp(x))
        return added


class Lstm(nn.Module):
    """One LSTM layer between an embedding and the logits.

    >>> Lstm(tokens=256, width=32)(torch.zeros(2, 10, dtype=torch.int64)).shape
    torch.Size([2, 256, 10])
    """

    def __init__(self, *, tokens: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width // 2)
        self.lstm = nn.LSTM(width // 2, width, batch_first=True)
        self.out = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(x))
        logits: Tensor = self.out(hidden)
        return logits.transpose(1, 2)
