#!/usr/bin/env python3
"""A first run on two unlike workers, in its smallest form: one recipe for one worker, one budget, nothing tuned.

    torchrun --nproc-per-node 2 scripts/first_run.py --row balance
    python scripts/first_run.py --row single

Rank 1 takes three times as long for a sample as rank 0. Both use the CUDA device if there is one; two ranks of one
device meet over gloo, as NCCL refuses them. Rank 0 prints a line of JSON: seconds and held-out score. `--amp`,
`--compile` and `--fsdp` change how the net trains. `scripts/gpu` runs all rows.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix

ROWS = {
    "single": {},
    "static": {"policy": "static"},
    "lb_bsp": {"policy": "lb_bsp"},
    "balance": {"policy": "dynamix"},
    "adapt": {"policy": "dynamix", "global_batch": "adaptive"},
}
BATCH, RATE = 64, 0.05  # the recipe of one worker
SECONDS_A_SAMPLE = (2e-4, 6e-4)
INPUTS, OUTPUTS, HELD_OUT = 32, 4, 2000


def data(count: int) -> tuple[Tensor, Tensor]:
    """Inputs, and what a fixed net of tanh says of them, with noise on all but the last `HELD_OUT`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count + HELD_OUT, INPUTS, generator=generator)
    first, second = (torch.randn(shape, generator=generator) for shape in ((INPUTS, 8), (8, OUTPUTS)))
    y = torch.tanh(x @ first / 3) @ second
    y[:count] += 2 * y.std() * torch.randn(count, OUTPUTS, generator=generator)
    return x, y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS, default="balance")
    parser.add_argument("--budget", type=int, default=32_768, help="samples of the recipe's batch")
    for option in ("--amp", "--compile", "--fsdp"):
        parser.add_argument(option, action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone = args.row == "single"
    if not alone:
        dist.init_process_group("gloo")
    rank = 0 if alone else dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = data(args.budget)
    dataset = TensorDataset(x[: args.budget], y[: args.budget])
    net: nn.Module = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, OUTPUTS)).to(device)
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    model = net if alone or args.fsdp else DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    run = torch.compile(model, dynamic=True) if args.compile else model
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=False)
    steps = args.budget // (BATCH * (1 if alone else 2))
    falling = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step / steps, 1))) / 2
    )
    controller = None
    if not alone:
        controller = dynamix.Controller(batch_size=BATCH, rate_for=BATCH, interval=5, **ROWS[args.row])
        loader = controller.loader(loader)
        controller.wrap(model, optimizer)
        controller.scheduler(falling)
    began, epoch = time.perf_counter(), 0
    for epoch in range(1) if controller is None else controller.budget(epochs=1):
        if controller is not None:
            loader.set_epoch(epoch)
        for inputs, target in loader:
            time.sleep(SECONDS_A_SAMPLE[rank] * len(inputs))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
                loss = F.mse_loss(run(inputs.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if controller is None:
                falling.step()
            else:
                controller.step(loss=loss)
                if controller.stopping:
                    break
    seconds = time.perf_counter() - began
    with torch.no_grad():
        predicted = net(x[args.budget :].to(device)).cpu()
    score = 1 - float(F.mse_loss(predicted, y[args.budget :]) / y[args.budget :].var(0).mean())
    if rank == 0:
        samples = args.budget if controller is None else controller.samples_seen
        found = {"row": args.row, "device": device.type, "seconds": round(seconds, 3), "score": round(100 * score, 2)}
        print(json.dumps({**found, "samples": samples}), flush=True)
    if controller is not None:
        controller.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
