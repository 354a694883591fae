"""Pieces: a large share passes through the model in micro-batches of one size. Here rank 1 is three times slower.

torchrun --nproc-per-node 2 examples/pieces.py

The faster rank gets more pieces of a round, not larger ones, so memory and compiled code see one shape.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix

EPOCHS = 3
SECONDS_PER_SAMPLE = (1e-4, 3e-4)  # of each rank, in place of a faster and a slower machine


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    x = torch.randn(8192, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    controller = dynamix.Controller("lb_bsp", batch_size=128, micro_batch=16, global_batch="fixed", interval=5)
    sampler = controller.batch_sampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = controller.wrap(DDP(net), optimizer)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        pieces = rounds = 0
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            time.sleep(SECONDS_PER_SAMPLE[rank % 2] * len(inputs))
            loss.backward()
            pieces += 1
            if controller.optimizer_due:
                optimizer.step()
                optimizer.zero_grad()
                rounds += 1
            controller.step(loss=loss)
        sizes = controller.batch_sizes.tolist()
        print(f"epoch {epoch}, rank {rank}: {rounds} rounds, {pieces} pieces; a round is {sizes}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
