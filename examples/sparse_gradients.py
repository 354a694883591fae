"""Embeddings whose gradients are mostly zero: workers exchange only the other values and their index.

torchrun --nproc-per-node 2 examples/sparse_gradients.py

Embeddings have sparse gradients (`sparse=True`), which the hook gathers, those of all tables at once. Prints how many
buckets took which way, and the bytes sent instead of a dense all-reduce. With --aggregator HOST:PORT the gradients are
dense, and an aggregator in the network computes their sums in fixed point (dynamix-homomorphic;
start one with `dynamix aggregator`, which prints its address).
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.compression import CompressionState, compression_hook


class Recommender(nn.Module):
    """Rating from a user's and an item's vector."""

    def __init__(self, users: int = 4000, items: int = 2000, width: int = 16, *, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=sparse)
        self.items = nn.Embedding(items, width, sparse=sparse)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--aggregator", metavar="HOST:PORT")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairs = torch.stack([torch.randint(4000, (8192,)), torch.randint(2000, (8192,))], 1)
    dataset = TensorDataset(pairs, torch.randn(8192))
    net = Recommender(sparse=options.aggregator is None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    controller = dynamix.Controller(policy="dynamix", batch_size=64, max_batch_size=256, interval=5)
    sampler = controller.batch_sampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    # Sparse gradients are gathered in any mode. For dense ones "auto", the default, measures and chooses the way.
    mode = "auto" if options.aggregator is None else "compaction"
    state = CompressionState(mode, model=net, aggregator=options.aggregator)
    model = controller.wrap(DDP(net), optimizer, hook=compression_hook, hook_state=state)
    for inputs, target in loader:
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    if dist.get_rank() == 0:
        counted = state.statistics.as_dict()
        print(f"loss {loss.item():.3f}; {counted}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
