"""One small job under each framework, and what it is compared with: a replay of every round as one union batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dynamix
from dynamix.compression import CompressionState, compression_hook
from tests.ranks import run_ranks
from tests.union import Script, larger

SAMPLES, BATCH, LIMIT, LR, CLIP, PIECE = 101, 8, 2e-5, 0.05, 0.3, 4


QUIET_LIGHTNING: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
QUIET_TRANSFORMERS: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "report_to": []}
QUIET_TRANSFORMERS |= {"disable_tqdm": True, "remove_unused_columns": False, "dataloader_pin_memory": False}


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
    """What a job of two ranks is like.

    shares   of the ranks per batch, one after the other
    stop     optimizer steps after which it ends, to be resumed by another
    to       ranks that resume it
    how      "hook": gradients are compressed; "pieces": shares are cut; "rounds": ranks meet over parameters
    """

    shares: str = "grow"
    accumulate: int = 1
    clip: bool = False
    tokens: bool = False
    stop: int | None = None
    to: int = 2
    how: str = ""
    epochs: int = 2

    @property
    def in_pieces(self) -> bool:
        return self.how in ("pieces", "rounds")

    def settings(self, **options: Any) -> dynamix.Settings:
        kept = {"interval": 2, "min_batch_size": 2, "max_batch_size": 32, "lr_rule": "none"}
        kept |= {} if self.shares == "move" else {"global_batch": "adaptive", "min_global_batch": 2}
        if self.in_pieces:
            kept |= {"micro_batch": PIECE, "batch_size": BATCH}
            kept |= {"meet": "parameters"} if self.how == "rounds" else {}
        workers = dist.get_world_size() if dist.is_initialized() else 1
        return dynamix.Settings(Script(SHARES[self.shares][workers], self.accumulate), **kept, **options)

    def wrapping(self, **options: Any) -> dict[str, Any]:
        """Options of `Controller.wrap`, a collective call."""
        if self.how == "hook":
            options |= {"hook": compression_hook, "hook_state": CompressionState("compaction")}
        return options

    def net(self) -> Net:
        return Counting(tokens=True) if self.tokens else Means(tokens=False)


SHARES: dict[str, dict[int, list[list[int]]]] = {
    "grow": {
        1: [[18], [24], [30]],
        2: [[6, 10], [10, 14], [18, 14], [20, 20]],
        3: [[6, 10, 4], [10, 14, 4], [12, 14, 14]],
    },
    "shrink": {1: [[6], [4], [3]], 2: [[10, 6], [6, 6], [3, 5]], 3: [[8, 4, 4], [4, 4, 4], [2, 3, 3]]},
    "move": {1: [[16]], 2: [[12, 4], [5, 11]], 3: [[8, 4, 4], [3, 5, 8]]},
}
RESUMED_BY_OTHERS = [
    Row("grow", stop=4, to=3),
    Row("shrink", accumulate=2, clip=True, tokens=True, stop=3, to=1),
    Row("move", accumulate=2, clip=True, stop=3, to=3),
]


@dataclass
class Trail:
    """What a rank trained, and its parameters after each optimizer step."""

    samples: list[list[int]] = field(default_factory=list)  # of each batch
    steps: list[tuple[int, Tensor]] = field(default_factory=list)  # batches until then, parameters
    met: list[tuple[int, Tensor]] = field(default_factory=list)  # the same after each round


def followed(net: Net, optimizer: torch.optim.Optimizer) -> Trail:
    """The trail that a model and its optimizer leave from now on."""
    trail = Trail(samples=net.seen)

    def note(*_: Any) -> None:
        trail.steps.append((len(net.seen), flat(net).clone()))

    optimizer.register_step_post_hook(note)
    return trail


def loader(row: Row) -> DataLoader[Any]:
    return DataLoader(Pairs(tokens=row.tokens), batch_size=BATCH, shuffle=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


def check(row: Row, parts: Sequence[list[Trail]]) -> float:
    """Every sample once an epoch; the largest difference of any parameter from training on the union batches.

    parts   of the job, each with the trails of its ranks
    """
    dealt: list[int] = []
    net, data, worst = row.net(), Pairs(tokens=row.tokens), 0.0
    optimizer = sgd(net)
    for trails in parts:
        for step in range(len(trails[0].steps)):
            begins = [trail.steps[step - 1][0] if step else 0 for trail in trails]
            batches = [trail.samples[a : trail.steps[step][0]] for a, trail in zip(begins, trails, strict=True)]
            dealt += (union := [i for of_rank in batches for batch in of_rank for i in batch])
            _train(net, optimizer, data, union, clip=row.clip)
            worst = larger(worst, max(float((trail.steps[step][1] - flat(net)).abs().max()) for trail in trails))
        ends = [(trail.steps[-1][0], len(trail.samples)) for trail in trails]
        assert all(last == batches for last, batches in ends), f"batches after the last optimizer step: {ends}"
    _require_once(row, dealt)
    return worst


def check_rounds(row: Row, trails: list[Trail]) -> float:
    """Of ranks that step apart: every sample once an epoch; how far they are from their mean, by samples, after rounds.

    What their own steps are made of is torch's.
    """
    worst, dealt = 0.0, list[int]()
    for meeting in range(len(trails[0].met)):
        moved = torch.zeros_like(trails[0].met[0][1])
        batches = []
        for trail in trails:
            begin, end = trail.met[meeting - 1][0] if meeting else 0, trail.met[meeting][0]
            batches.append([i for batch in trail.samples[begin:end] for i in batch])
            moved += len(batches[-1]) * next(after for trained, after in trail.steps[::-1] if trained <= end)
        mean = moved / sum(map(len, batches))
        worst = larger(worst, max(float((trail.met[meeting][1] - mean).abs().max()) for trail in trails))
        dealt += [i for batch in batches for i in batch]
    assert all(trail.met[-1][0] == len(trail.samples) for trail in trails), "batches after the last meeting"
    assert len({len(trail.steps) for trail in trails}) > 1, "no rank took more steps than another"
    _require_once(row, dealt)
    return worst


def _train(net: Net, optimizer: torch.optim.Optimizer, data: Pairs, samples: list[int], *, clip: bool) -> None:
    index = torch.tensor(samples)
    optimizer.zero_grad()
    net(data.x[index], data.y[index], index)["loss"].backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    optimizer.step()


def _require_once(row: Row, dealt: list[int]) -> None:
    assert len(dealt) == row.epochs * SAMPLES, (len(dealt), row)
    for epoch in range(row.epochs):
        assert sorted(dealt[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES)), row


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


Train = Callable[[Row, Path, bool], Trail]
"""Trains a row, or goes on with it from what it left in the folder."""
Stacks = Mapping[str, tuple[Train, Sequence[Row]]]


def run_rows(stacks: Stacks, folder: Path) -> dict[str, list[list[list[Trail]]]]:
    """Of each stack by row, by part of the job, by rank. All jobs begin on two ranks.

    One set of processes trains all of them: to start one takes longer than to train in it.
    """
    parts: dict[str, list[list[list[Trail]]]] = {stack: [[] for _ in rows] for stack, (_, rows) in stacks.items()}
    jobs = [(stack, n) for stack, (_, rows) in stacks.items() for n in range(len(rows))]
    for workers in (2, 1, 3):
        tasks = []
        for stack, n in jobs:
            row = stacks[stack][1][n]
            tasks += [(stack, n, False)] * (workers == 2) + [(stack, n, True)] * bool(row.stop and row.to == workers)
        told = [(stacks[s][0], stacks[s][1][n], folder / s / str(n), resume) for s, n, resume in tasks]
        by_rank = run_ranks(_trained, workers, told, timeout_s=280, group_timeout_s=100, frameworks=True)
        for (stack, n, _), *trails in zip(tasks, *by_rank, strict=True):
            parts[stack][n].append(trails)
    return parts


def _trained(rank: int, tasks: list[tuple[Train, Row, Path, bool]]) -> list[Trail]:
    as_under_torchrun(rank)
    return [train(*task) for train, *task in tasks]


def check_other_batches(train: Train, folder: Path) -> None:
    """One process: a job with a shrinking batch is resumed with a fixed one, and the other way round."""
    for begun, rest in ((Row("shrink", stop=10), Row("move")), (Row("move", stop=17), Row("grow"))):
        own = folder / begun.shares
        parts = [[train(begun, own, False)], [train(rest, own, True)]]
        assert check(begun, parts) <= LIMIT, begun


def check_rows(stack: str, rows: Sequence[Row], by_row: Sequence[list[list[Trail]]]) -> None:
    for row, parts in zip(rows, by_row, strict=True):
        sizes = {len(batch) for trails in parts for trail in trails for batch in trail.samples}
        assert len(sizes) > 2, f"shares never moved: {stack}, {row}"
        worst = check_rounds(row, parts[0]) if row.how == "rounds" else check(row, parts)
        assert worst <= LIMIT, (worst, stack, row)


def as_under_torchrun(rank: int) -> None:
    """What frameworks know a launcher by; the process group is there already."""
    workers = dist.get_world_size()
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "GROUP_RANK": 0}
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {name: str(value) for name, value in launched.items()} | known | {"ACCELERATE_USE_CPU": "true"}
