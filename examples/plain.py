"""A plain DDP script without dynamix, for `dynamix observe`. Here rank 1 has a slow data loader.

torchrun --nproc-per-node 2 examples/plain.py
torchrun --nproc-per-node 2 -m dynamix.observe examples/plain.py    # the same training, and a report
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SECONDS_PER_SAMPLE = (1e-5, 5e-4)  # to read it, on each rank
HELD: list[object] = []  # until the process ends: it aborts if a thread of torch is the last to release a group


class Slowly(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take a while to read."""

    def __init__(self, rank: int) -> None:
        self.x = torch.randn(2048, 20, generator=torch.Generator().manual_seed(0))
        self.rank = rank

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SECONDS_PER_SAMPLE[self.rank % 2])
        return self.x[index], (self.x[index, :5].sum() > 0).long()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    data = Slowly(rank)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    dist.barrier()  # no rank leaves while another still exchanges
    HELD.append(dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
