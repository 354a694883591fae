"""Every worker sets its own batch size from its own metrics and the traces that all leave.

torchrun --nproc-per-node 2 examples/no_arbiter.py
dynamix emulate demo -- python examples/no_arbiter.py     # the same script on four unlike hosts
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(8192, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller = dynamix.Controller(
        policy="stigmergic", batch_size=32, max_batch_size=128, global_batch="adaptive", interval=5
    )
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, seed=0))
    model = controller.wrap(DDP(net), optimizer)
    for inputs, target in loader:
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, batch sizes {controller.batch_sizes.tolist()}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
