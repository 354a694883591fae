"""`controller.metrics()` in TensorBoard, in Weights & Biases without a network, or in MLflow.

torchrun --nproc-per-node 2 examples/loggers.py --to tensorboard --folder logged

Needs the package of that logger: tensorboard, wandb, mlflow (or mlflow-skinny with sqlalchemy and alembic).
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dynamix

EVERY = 10  # steps
Log = Callable[[dict[str, float], int], None]


def tensorboard(folder: Path) -> tuple[Log, Callable[[], Any]]:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(metrics: dict[str, float], samples: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(f"dynamix/{name}", value, samples)

    return log, writer.close


def wandb(folder: Path) -> tuple[Log, Callable[[], Any]]:
    run = importlib.import_module("wandb").init(project="dynamix", mode="offline", dir=str(folder))
    run.define_metric("dynamix/*", step_metric="dynamix/samples")

    def log(metrics: dict[str, float], _: int) -> None:
        run.log({f"dynamix/{name}": value for name, value in metrics.items()})

    return log, run.finish


def mlflow(folder: Path) -> tuple[Log, Callable[[], Any]]:
    client = importlib.import_module("mlflow")
    client.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")
    client.set_experiment("dynamix")
    client.start_run()

    def log(metrics: dict[str, float], samples: int) -> None:
        known = {f"dynamix/{name}": value for name, value in metrics.items() if not math.isnan(value)}
        client.log_metrics(known, step=samples)

    return log, client.end_run


def main() -> None:
    loggers = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", choices=loggers, default="tensorboard")
    parser.add_argument("--folder", type=Path, default=Path("logged"))
    asked = parser.parse_args()

    dist.init_process_group("gloo")
    leads = dist.get_rank() == 0
    if leads:
        asked.folder.mkdir(parents=True, exist_ok=True)
        log, close = loggers[asked.to](asked.folder)
    torch.manual_seed(0)
    x = torch.randn(2048, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    controller = dynamix.Controller("lb_bsp", batch_size=32, interval=5)
    loader = DataLoader(data, batch_sampler=controller.batch_sampler(data, seed=0))
    model = controller.wrap(DistributedDataParallel(net), optimizer)
    for step, (inputs, targets) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        controller.step(loss=loss)
        if leads and step % EVERY == 0:
            log(controller.metrics(), controller.samples_seen)
    controller.close()
    if leads:
        close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
