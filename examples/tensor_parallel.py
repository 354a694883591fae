"""Tensor parallelism inside of a worker, FSDP2 between workers: 2 x 2 ranks. Here the second worker is slower.

torchrun --nproc-per-node 4 examples/tensor_parallel.py

Both ranks of a worker need the same samples. So each of the two data-parallel groups has its own controller, and
shares are fixed: they are measured once, before training, and are the same list on every rank.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import dynamix

BATCH = 24  # samples of all workers in a step
SECONDS_PER_SAMPLE = (1e-3, 3e-3)  # of each worker, in place of a faster and a slower machine


def work(samples: int, mesh: DeviceMesh) -> None:
    time.sleep(SECONDS_PER_SAMPLE[mesh["dp"].get_local_rank()] * samples)


def measured_shares(mesh: DeviceMesh) -> list[int]:
    """Sizes in proportion to speed, from one measurement of every rank. A worker is as slow as its slowest rank."""
    began = time.perf_counter()
    work(8, mesh)
    seconds = torch.tensor([0.0] * mesh["dp"].size())
    seconds[mesh["dp"].get_local_rank()] = time.perf_counter() - began
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    first = round(BATCH * float(seconds[1] / seconds.sum()))
    return [first, BATCH - first]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    x = torch.randn(960, 16)
    dataset = TensorDataset(x, (x[:, :4].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    sizes = measured_shares(mesh)
    controller = dynamix.Controller(
        "static", BATCH // 2, min_batch_size=sizes, max_batch_size=sizes, process_group=mesh["dp"].get_group()
    )
    sampler = controller.batch_sampler(dataset, seed=0)
    model = controller.wrap(net, optimizer)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in DataLoader(dataset, batch_sampler=sampler):
            loss = F.cross_entropy(model(inputs), target)
            work(len(inputs), mesh)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
    waited = controller.metrics()["exchange_s"]
    dp, tp = mesh.get_coordinate() or (0, 0)
    print(f"worker {dp}, rank {tp} of 2: shares {sizes}, loss {loss.item():.3f}, {1e3 * waited:.0f} ms not computing")
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
