"""A byte-level language model of Python's own source: samples of unlike length, weighted by bytes, not by samples.

torchrun --nproc-per-node 2 examples/language_model.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import dynamix
from dynamix_lab.tasks import as_is, make_workload, score


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="pysource", help="pysource (transformer) or pysource-lstm")
    parser.add_argument("--policy", default="dynamix")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    workload = make_workload(args.workload)
    data = workload.make_data(0, train=8000, test=200)
    net = workload.make_model(0)
    optimizer = workload.make_optimizer(net.parameters())
    controller = dynamix.Controller(
        policy=args.policy,
        batch_size=16,
        limits=dynamix.Limits(workload.min_batch, workload.max_batch),
        interval=5,
    )
    sampler = controller.batch_sampler(data.train, seed=0)
    loader = DataLoader(data.train, batch_sampler=sampler, collate_fn=as_is)
    model = controller.wrap(DDP(net), optimizer, weighting="loss")
    step = epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = workload.loss(model(inputs), targets)  # a mean over the bytes of this batch
            controller.weight(loss, count=workload.divisor(targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
            step += 1
            if step == args.steps:
                break
        epoch += 1
    if dist.get_rank() == 0:
        sizes, reached = controller.batch_sizes.tolist(), score(workload, net, data.test)
        print(f"step {step}: loss {loss.item():.3f}, next byte right {100 * reached:.1f} %, batch sizes {sizes}")
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
