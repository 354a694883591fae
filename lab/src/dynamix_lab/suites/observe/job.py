"""A training script to be observed: `python job.py '{"steps": 60, ...}'` in the environment of torchrun.

Without `policy` it does not use dynamix. A `part` of the steps of rank `slow` takes `sleep_s` longer. Rank 0 prints one
line of JSON: samples a second of all ranks in the second half of the steps.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

USUAL: dict[str, Any] = {
    "steps": 60,
    "batch": 32,
    "samples": 1000,
    "width": 64,
    "part": None,
    "slow": 0,
    "sleep_s": 0.0,
    "forward_s": 0.0,
    "backward_s": 0.0,
    "policy": None,
    "clock": False,
}
CLASSES = 10

HELD: list[object] = []  # kept until the process ends: it aborts if a thread of torch releases a group last


class Sleeping(torch.autograd.Function):
    """The identity, whose forward and backward sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Net(nn.Module):
    """Three linear layers, with a sleep in the middle."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, CLASSES)
        self.sleeps = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if any(self.sleeps):
            hidden = Sleeping.apply(hidden, *self.sleeps)  # type: ignore[no-untyped-call]
        out: Tensor = self.last(hidden)
        return out


class SlowlyRead(Dataset[tuple[Tensor, Tensor]]):
    """Random samples, each of which takes `sleep_s` to read."""

    def __init__(self, count: int, width: int, sleep_s: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, width, generator=generator)
        self.y = torch.randint(CLASSES, (count,), generator=generator)
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.x[index], self.y[index]


def main() -> None:
    given = {**USUAL, **json.loads(sys.argv[1])}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    longer = {given["part"]: given["sleep_s"]} if rank == given["slow"] else {}
    data = SlowlyRead(given["samples"], given["width"], longer.get("data", 0.0) / given["batch"])
    sleeps = [given[f"{part}_s"] + longer.get(part, 0.0) for part in ("forward", "backward")]
    net = Net(given["width"], *sleeps)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with contextlib.ExitStack() as stack:
        controller = None
        if given["policy"]:
            import dynamix

            controller = dynamix.Controller(given["policy"], given["batch"], global_batch="fixed", interval=5)
            stack.callback(controller.close)
            sampler: Any = controller.batch_sampler(data, seed=0)
            loader = DataLoader(data, batch_sampler=sampler)
            model: nn.Module = controller.wrap(DDP(net), optimizer)
        else:
            sampler = DistributedSampler(data, seed=0)
            loader = DataLoader(data, batch_size=given["batch"], sampler=sampler)
            model = DDP(net)
        if given["clock"]:
            from dynamix_lab.emulator import control

            dist.barrier()
            if rank == 0:
                control.request("start-clock")
            dist.barrier()
        pace = train(given["steps"], loader, sampler, model, optimizer, controller)
    if rank == 0:
        print(json.dumps({"samples_per_s": pace}), flush=True)
    HELD.append(dist.group.WORLD)
    dist.destroy_process_group()


def train(steps: int, loader: Any, sampler: Any, model: nn.Module, optimizer: Any, controller: Any) -> float:
    """Samples a second of all ranks in the second half of `steps`."""
    step, epoch, samples, began_s = 0, 0, 0, time.perf_counter()
    while step < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if controller is not None:
                controller.step(loss=loss)
            step += 1
            samples += len(x)
            if step == steps // 2:
                samples, began_s = 0, time.perf_counter()
            if step == steps:
                break
    took_s = time.perf_counter() - began_s
    count = torch.tensor([float(samples)])
    dist.all_reduce(count)
    return float(count) / took_s


if __name__ == "__main__":
    main()
