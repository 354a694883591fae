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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import dynamix
from dynamix_lab.opponents.trial import set_rate
from dynamix_lab.tasks import as_is, make_workload

ROWS = {
    "single": {},
    "static": {"policy": "static"},
    "lb_bsp": {"policy": "lb_bsp"},
    "balance": {"policy": "dynamix"},
    "adapt": {"policy": "dynamix", "global_batch": "adaptive"},
}
BATCH, RATE = 64, 0.05  # the recipe of one worker
SECONDS_A_SAMPLE = (2e-4, 6e-4)
HELD_OUT = 2000


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
    job = make_workload("teacher")
    data, net = job.make_data(0, train=args.budget, test=HELD_OUT), job.make_model(0).to(device)
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    model = net if alone or args.fsdp else DDP(net)
    optimizer = job.make_optimizer(net.parameters())
    set_rate(optimizer, RATE)
    run = torch.compile(model, dynamic=True) if args.compile else model
    loader = DataLoader(data.train, batch_size=BATCH, shuffle=True, collate_fn=as_is)
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
                loss = job.loss(run(inputs.to(device)), target.to(device))
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
        score = job.metric(net(data.test.inputs.to(device)).cpu(), data.test.targets)
    if rank == 0:
        samples = args.budget if controller is None else controller.samples_seen
        found = {"row": args.row, "device": device.type, "seconds": round(seconds, 3), "score": round(100 * score, 2)}
        print(json.dumps({**found, "samples": samples}), flush=True)
    if controller is not None:
        controller.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
