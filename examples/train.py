"""An ordinary DDP training script with dynamix's few lines (marked), on data made in place.

torchrun --nproc-per-node 2 examples/train.py --policy dynamix
dynamix emulate demo -- python examples/train.py     # the same script on four unlike hosts
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="dynamix")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    x = torch.randn(4096, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    controller = dynamix.Controller(policy=args.policy, batch_size=32, interval=5)  # dynamix
    sampler = controller.batch_sampler(dataset, seed=0)  # dynamix
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = controller.wrap(DDP(net), optimizer)  # dynamix
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            logits = model(inputs)
            loss = F.cross_entropy(logits, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss, logits=logits, target=target)  # dynamix
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, batch sizes {controller.batch_sizes.tolist()}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
