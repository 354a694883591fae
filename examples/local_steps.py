"""Local steps: each worker takes its own optimizer steps, and all average their parameters once a round.

torchrun --nproc-per-node 2 examples/local_steps.py
torchrun --nproc-per-node 2 examples/local_steps.py --meet auto

Here rank 1 is three times slower. Both ranks finish a round at about the same time: the faster one has taken more
steps. With `--meet auto` the job first averages gradients, and takes local steps once it has measured the exchange.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dynamix

EPOCHS = 3
SECONDS_PER_SAMPLE = (1e-4, 3e-4)  # of each rank, in place of a faster and a slower machine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--meet", choices=("parameters", "auto"), default="parameters")
    auto = parser.parse_args().meet == "auto"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    x = torch.randn(8192, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    if auto:
        controller = dynamix.Controller("lb_bsp", batch_size=16, meet="auto", interval=5)
    else:  # 128 / 16 = 8 local steps a round, mean over workers
        controller = dynamix.Controller("lb_bsp", batch_size=128, micro_batch=16, meet="parameters", interval=5)
    sampler = controller.batch_sampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = controller.wrap(DistributedDataParallel(net) if auto else net, optimizer)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        steps = meetings = 0
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            time.sleep(SECONDS_PER_SAMPLE[rank % 2] * len(inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
            steps += 1
            meetings += controller.met
        sizes = controller.batch_sizes.tolist()
        print(f"epoch {epoch}, rank {rank}: {steps} steps, {meetings} meetings; a round is {sizes}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
