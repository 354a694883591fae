"""Ray Train on this machine: two workers of unlike speed, shares that follow it, and a checkpoint after every epoch.

Needs `pip install ".[ray]"`, in dynamix's source tree. RAY_AUTH_MODE=disabled lets a cluster start on a machine
without a token.

RAY_AUTH_MODE=disabled python examples/ray_train.py
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.integrations.ray import report, resume


def train(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    x = torch.randn(2048, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    controller = dynamix.Controller("lb_bsp", batch_size=32, interval=5)
    loader = controller.loader(DataLoader(dataset, batch_size=32, shuffle=True))
    model = prepare_model(net)
    controller.wrap(model, optimizer)
    resume(controller, net=net, optimizer=optimizer)
    while controller.samples_seen < settings["epochs"] * len(dataset):
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            time.sleep(len(inputs) * (0.0005 if rank else 0.0002))  # the second worker is slower
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
        told = {"loss": loss.item(), "sizes": controller.batch_sizes.tolist()}
        report(told, controller, net=net, optimizer=optimizer)
    controller.close()


def main() -> None:
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "180")  # on a busy machine
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": 3},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=2)),
        )
        print(trainer.fit().metrics)
    ray.shutdown()


if __name__ == "__main__":
    main()
