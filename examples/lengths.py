"""Text of unlike length: each rank gets samples of similar length, so that ranks finish together and little is padded.

torchrun --nproc-per-node 2 examples/lengths.py

The data are lines of Python's standard library, padded to the longest of a batch. Unsorted, the model computes on about
twice the bytes of the text; by length, on 1.5 times; with four ranks, or in pieces, on little more than the text.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import dynamix

SAMPLES, LONGEST, PAD = 3000, 200, 0


class Lines(Dataset[Tensor]):
    """Lines of source, each as its bytes."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            self.lines += [line[:LONGEST] for line in path.read_bytes().splitlines() if len(line) > 1]
            if len(self.lines) >= SAMPLES:
                break
        del self.lines[SAMPLES:]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Tensor:
        return torch.frombuffer(bytearray(self.lines[index]), dtype=torch.uint8).long()


def collate(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=PAD)


def train(lines: Lines, *, by_length: bool, micro_batch: int | None = None) -> float:
    """Train one epoch; returns the bytes that the model computed on over the bytes of the text, of all ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    controller = dynamix.Controller("goodput", batch_size=32, micro_batch=micro_batch, interval=5)
    lengths = [len(line) for line in lines.lines] if by_length else None
    sampler = controller.batch_sampler(lines, seed=0, lengths=lengths, padded=by_length)
    model = controller.wrap(DDP(net), optimizer, weighting="loss")
    computed, there = torch.zeros(1), torch.zeros(1)
    for batch in DataLoader(lines, batch_sampler=sampler, collate_fn=collate):
        target = batch[:, 1:]
        bytes_there = int((target != PAD).sum())
        with controller.piece():
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), target.flatten(), ignore_index=PAD)
            controller.weight(loss, count=bytes_there).backward()  # a mean over the bytes of all ranks
        if controller.optimizer_due:
            optimizer.step()
            optimizer.zero_grad()
        controller.step(loss=loss)
        computed += batch.numel()
        there += int((batch != PAD).sum())
    controller.close()
    for total in (computed, there):
        dist.all_reduce(total)
    return float(computed / there)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = Lines()
    ways: dict[str, dict[str, Any]] = {
        "as they come": {"by_length": False},
        "dealt by length": {"by_length": True},
        "dealt by length, in pieces of 8": {"by_length": True, "micro_batch": 8},
    }
    for name, options in ways.items():
        ratio = train(lines, **options)
        if dist.get_rank() == 0:
            print(f"{name}: {ratio:.2f} bytes computed for each that there is", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
