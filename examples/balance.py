"""Balance: the global batch stays the same, and only workers' shares of it change. Here rank 1 is three times slower.

torchrun --nproc-per-node 2 examples/balance.py

Every optimizer step has the same number of samples. So the learning rate stays right and `len(loader)` is exact, and
the schedule below uses it as any other script does.
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

    x = torch.randn(4096, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    controller = dynamix.Controller(policy="lb_bsp", batch_size=32, global_batch="fixed", interval=5)
    sampler = controller.batch_sampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = controller.wrap(DDP(net), optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            time.sleep(SECONDS_PER_SAMPLE[rank % 2] * len(inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            controller.step(loss=loss)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, batch sizes {controller.batch_sizes.tolist()}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
