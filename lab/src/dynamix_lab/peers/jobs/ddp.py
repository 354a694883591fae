"""Plain PyTorch: DistributedDataParallel, DistributedSampler, equal batches, constant learning rate."""

from __future__ import annotations

import datetime
import itertools
import sys

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from .job import Run, Task, as_is


def main(path: str) -> None:
    task = Task(path)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    task.warm_up(DDP)
    net = task.model()
    model = DDP(net)
    optimizer = task.optimizer(model.parameters())
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(task.data, seed=task.seed)
    loader = DataLoader(task.data, batch_size=task.share, sampler=sampler, collate_fn=as_is)
    run = Run(task, net)
    run.begin()
    samples, going = 0, True
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            samples += len(targets) * task.world_size
            going = run.goes_on(samples, loss.item(), [task.share] * task.world_size)
            if not going:
                break
        if not going:
            break
    run.finish()


if __name__ == "__main__":
    main(sys.argv[1])
