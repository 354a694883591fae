"""The ten-line test: one rank has four samples, the other two, and both get the gradient of all six.

Plain DDP averages the two ranks' means, which is wrong, without a warning; a weighted hook gets it right.

    torchrun --nproc-per-node 2 examples/unequal_batches.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamix

DATA = torch.tensor([2.0, 4.0, 6.0, 8.0, 10.0, 20.0])
TARGET = 3 * DATA + 1


def gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.zero_grad()
    nn.functional.mse_loss(model(x[:, None]), y[:, None]).backward()
    return float(next(model.parameters()).grad)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = slice(0, 4) if rank == 0 else slice(4, 6)  # 4 samples here, 2 there

    def net() -> nn.Linear:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    true = gradient(net(), DATA, TARGET)
    plain = gradient(DDP(net()), DATA[mine], TARGET[mine])
    model = DDP(net())
    model.register_comm_hook(None, dynamix.weighted(allreduce_hook, count=lambda: (len(DATA[mine]), len(DATA))))
    ours = gradient(model, DATA[mine], TARGET[mine])
    if rank == 0:
        print(f"one big batch {true:.3f}\nplain DDP     {plain:.3f}\nweighted      {ours:.3f}")
    assert abs(ours - true) < 1e-3 < abs(plain - true)
    dist.barrier()  # gloo's threads must drop the hook before the groups are destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
