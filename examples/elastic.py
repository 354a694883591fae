"""A job whose workers come and go. It resumes from its last checkpoint, and no sample is lost or trained twice.

torchrun --nproc-per-node 2 examples/elastic.py --folder job    # here alone; on hosts that come and go:
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 10 \
    --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id job examples/elastic.py --folder /shared/job

Start the same line on every host, at any time. After Ctrl-C, a lost host, or a new one, the others continue.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix import elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    elastic.require_restartable()  # before the process group, which fails first after a restart
    dist.init_process_group("gloo")
    args.folder.mkdir(parents=True, exist_ok=True)
    rank, saved = dist.get_rank(), args.folder / "checkpoint.pt"

    x = torch.randn(6000, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    controller = dynamix.Controller("lb_bsp", batch_size=96 // dist.get_world_size(), interval=5)
    elastic.stop_on_sigterm(controller)
    loader = controller.loader(DataLoader(dataset, batch_size=96 // dist.get_world_size(), shuffle=True))
    model = controller.wrap(DDP(net), optimizer)

    def save() -> None:
        state = controller.state_dict(gather=True)  # on every rank
        if rank == 0:
            new = saved.with_suffix(".new")
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "controller": state}, new)
            os.replace(new, saved)  # whole, or not at all

    if saved.exists():
        state = torch.load(saved, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        controller.load_state_dict(state["controller"])
        if rank == 0:
            print(f"goes on at sample {controller.samples_seen} with {controller.batch_sizes.tolist()}", flush=True)
    while controller.samples_seen < args.epochs * len(dataset):
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
            if controller.checkpoint_due(every=args.every) or controller.stopping:
                save()
            if controller.stopping:
                elastic.leave(controller)
        if rank == 0:
            print(f"epoch done: sample {controller.samples_seen}, loss {loss.item():.3f}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
