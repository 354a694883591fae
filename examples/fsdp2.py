"""A byte-level transformer of Python's own source under FSDP2 and torch.compile. Here rank 1 is three times slower.

torchrun --nproc-per-node 2 examples/fsdp2.py --steps 200

The loop is that of plain FSDP2; only lines with `controller` are added. `quantum=4` makes batches multiples of 4, so
that compiled code sees few shapes.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import dynamix
from dynamix_lab.tasks import as_is, make_workload

SECONDS_PER_SAMPLE = (0.01, 0.03)  # of each rank, in place of a faster and a slower machine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile; inductor makes the fastest code")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # no in-place change
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    workload = make_workload("pysource")
    data = workload.make_data(0, train=4000, test=200)
    net = workload.make_model(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        block.compile(backend=args.backend, dynamic=False)
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = workload.make_optimizer(net.parameters())

    controller = dynamix.Controller(args.policy, batch_size=16, quantum=4, interval=5)
    sampler = controller.batch_sampler(data.train, seed=0)
    loader = DataLoader(data.train, batch_sampler=sampler, collate_fn=as_is)
    model = controller.wrap(net, optimizer)
    for step, (inputs, targets) in enumerate(loader):
        # A mean over samples: positions after the end of a text add nothing. (A mean over bytes needs their count:
        # examples/language_model.py.)
        loss = F.cross_entropy(model(inputs), targets, ignore_index=-100, reduction="sum") / targets.numel()
        time.sleep(SECONDS_PER_SAMPLE[rank % 2] * len(inputs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
        if step + 1 == args.steps:
            break
    told = controller.metrics()
    figures = (
        f"loss {loss.item():.3f}, {told['compute_s'] * 1e3:.0f} ms computing, {told['exchange_s'] * 1e3:.0f} ms not"
    )
    print(f"rank {rank}, step {step + 1}: {figures}, batch sizes {controller.batch_sizes.tolist()}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
