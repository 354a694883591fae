"""One small job under each framework, and what it is compared with: a replay of every round as one union batch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dynamix
from tests.union import Script, larger

SAMPLES, BATCH, LIMIT, LR, CLIP = 151, 8, 2e-5, 0.05, 0.3


class Pairs(Dataset[Any]):
    """Inputs, targets, and which sample it is."""

    def __init__(self, *, tokens: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = tokens
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = torch.randint(0, 3, (SAMPLES, 5), generator=generator)
        counts = torch.randint(1, 6, (SAMPLES,), generator=generator)
        if tokens:
            self.y[torch.arange(5)[None] >= counts[:, None]] = -100
        else:
            self.y = self.y[:, 0]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i], "sample": torch.tensor(i)}


class Net(nn.Module):
    """Classes of a sample, or of each of its five tokens. It notes which samples it is trained on."""

    def __init__(self, *, tokens: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = tokens
        self.seen: list[list[int]] = []
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 15 if tokens else 3))

    def loss(self, x: Tensor, labels: Tensor, sample: Tensor, count: Any) -> dict[str, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.seen.append(sample.tolist() if (labels != -100).any() else [])
        out = self.body(x)
        logits = out.view(-1, 3)
        if count is None:
            return {"loss": F.cross_entropy(logits, labels.flatten())}
        return {"loss": F.cross_entropy(logits, labels.flatten(), reduction="sum") / count}


class Means(Net):
    """Its loss is the mean over what it is given."""

    def forward(self, x: Tensor, labels: Tensor, sample: Tensor) -> dict[str, Tensor]:
        return self.loss(x, labels, sample, None)


class Counting(Net):
    """Its loss is divided by what it is told, as those of causal language models are."""

    accepts_loss_kwargs = True  # Transformers asks for it

    def forward(self, x: Tensor, labels: Tensor, sample: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        return self.loss(x, labels, sample, num_items_in_batch)


@dataclass(frozen=True)
class Row:
    """What a job is like.

    shares   of the two ranks per batch, one after the other
    stop     optimizer steps after which it ends, to be resumed by another
    """

    shares: str = "grow"
    accumulate: int = 1
    clip: bool = False
    tokens: bool = False
    stop: int | None = None
    epochs: int = 2

    def settings(self, **options: Any) -> dynamix.Settings:
        kept = {"interval": 3, "min_batch_size": 2, "max_batch_size": 32, "lr_rule": "none"}
        kept |= {"global_batch": "fixed" if self.shares == "move" else "adaptive"}
        return dynamix.Settings(Script(SHARES[self.shares], self.accumulate), **kept, **options)

    def net(self) -> Net:
        return Counting(tokens=True) if self.tokens else Means(tokens=False)


SHARES = {
    "grow": [[6, 10], [10, 14], [18, 14], [20, 20]],
    "shrink": [[10, 6], [6, 6], [3, 5]],
    "move": [[12, 4], [5, 11]],
}


@dataclass
class Trail:
    """What a rank trained, and its parameters after each optimizer step."""

    samples: list[list[int]] = field(default_factory=list)  # of each batch
    steps: list[tuple[int, Tensor]] = field(default_factory=list)  # batches until then, parameters


def followed(net: Net, optimizer: torch.optim.Optimizer) -> Trail:
    """The trail that a model and its optimizer leave from now on."""
    trail = Trail(samples=net.seen)

    def note(*_: Any) -> None:
        trail.steps.append((len(net.seen), torch.cat([p.detach().flatten() for p in net.parameters()]).clone()))

    optimizer.register_step_post_hook(note)
    return trail


def loader(row: Row) -> DataLoader[Any]:
    return DataLoader(Pairs(tokens=row.tokens), batch_size=BATCH, shuffle=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


def check(row: Row, trails: list[Trail]) -> float:
    """Every sample once an epoch; the largest difference of any parameter from training on the union batches."""
    batches = [[i for trail in trails for i in trail.samples[k]] for k in range(len(trails[0].samples))]
    dealt = [i for batch in batches for i in batch]
    assert len(dealt) == row.epochs * SAMPLES, (len(dealt), row)
    for epoch in range(row.epochs):
        assert sorted(dealt[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES)), row
    assert len({len(trail.samples[k]) for trail in trails for k in range(len(batches))}) > 2, "shares never moved"
    net, data, worst, begin = row.net(), Pairs(tokens=row.tokens), 0.0, 0
    optimizer = sgd(net)
    for step, (end, _) in enumerate(trails[0].steps):
        index = torch.tensor([i for batch in batches[begin:end] for i in batch])
        begin = end
        optimizer.zero_grad()
        net(data.x[index], data.y[index], index)["loss"].backward()
        if row.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        worst = larger(worst, max(float((trail.steps[step][1] - flat).abs().max()) for trail in trails))
    assert begin == len(batches), "batches after the last optimizer step"
    return worst


def as_under_torchrun(rank: int) -> None:
    """What frameworks know a launcher by; the process group is there already."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {name: str(value) for name, value in launched.items()} | known | {"ACCELERATE_USE_CPU": "true"}
