"""Adapt: the global batch grows, the learning rate follows, and a budget counts what is learned. Exchanges are slow.

torchrun --nproc-per-node 2 examples/adapt.py

The recipe is for one worker with 32 samples a step: rate 0.05, and a cosine over four epochs (`rate_for=32`). A sample
of a larger batch teaches less, so the job trains on more samples, in fewer steps, until as much is learned.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix

BATCH, EPOCHS = 32, 4


def slowly(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's own exchange, with a pause that stands for a slow network."""
    time.sleep(0.01)
    return allreduce_hook(state, bucket)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    x = torch.randn(8192, 20)
    labels = (x[:, :5].sum(1) > 0) ^ (torch.rand(len(x)) < 0.05)  # some are wrong, so large batches pay
    dataset = TensorDataset(x, labels.long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    controller = dynamix.Controller(policy="dynamix", batch_size=BATCH, rate_for=BATCH, global_batch="adaptive")
    sampler = controller.batch_sampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = controller.wrap(DDP(net), optimizer, hook=slowly)
    steps = EPOCHS * len(dataset) // (BATCH * dist.get_world_size())  # with the batch at the start
    controller.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps))
    budget = controller.budget(epochs=EPOCHS)
    for epoch in budget:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)  # also advances the schedule
            if controller.stopping:
                break
    if dist.get_rank() == 0:
        done = controller.metrics()
        print(f"loss {loss.item():.3f}; {done['step']:.0f} steps of up to {done['global_batch']:.0f} samples; ", end="")
        print(f"{steps} of {BATCH} a worker were planned")
        print(f"{done['samples']:,.0f} samples taught what {budget.samples:,} teach in the smaller steps")
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
