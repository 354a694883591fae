"""A job of Ray Train on a cluster of this machine: what `test_ray` starts. Prints a line of JSON at the end.

ray_job.py killed FOLDER    the second worker is killed once, 2 workers start again from the last checkpoint
ray_job.py elastic FOLDER   it begins with one worker, and goes on with two when there is room
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

SAMPLES, BATCH, EVERY = 2400, 48, 5  # steps between checkpoints


class Tally:
    """How often each sample was trained, over the line of checkpoints; saved as the sum over workers."""

    def __init__(self) -> None:
        self.before = torch.zeros(SAMPLES, dtype=torch.int64)
        self.here = self.before.clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        union = self.here.clone()
        dist.all_reduce(union)
        return {"trained": self.before + union}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.before = state["trained"]


def train(settings: dict[str, Any]) -> None:
    from ray.train.torch import prepare_model

    import dynamix
    from dynamix.integrations.ray import report, resume

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder, rank, workers = Path(settings["folder"]), dist.get_rank(), dist.get_world_size()
    x, net, tally = torch.randn(SAMPLES, 4), nn.Linear(4, 1), Tally()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    controller = dynamix.Controller("lb_bsp", batch_size=BATCH // workers, interval=2)
    loader = controller.loader(DataLoader(range(SAMPLES), batch_size=BATCH // workers, shuffle=True))  # type: ignore
    model = prepare_model(net)
    controller.wrap(model, optimizer)
    resume(controller, net=net, optimizer=optimizer, tally=tally)
    if rank == 0:
        with (folder / "starts.jsonl").open("a") as lines:
            lines.write(json.dumps({"workers": workers, "samples": controller.samples_seen}) + "\n")
    steps = 0
    while controller.samples_seen < settings["epochs"] * SAMPLES:
        for picked in loader:
            time.sleep(len(picked) * (0.001 if rank else 0.0003))
            model(x[picked]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tally.here[picked] += 1
            controller.step()
            steps += 1
            if settings["kill"] and rank == 1 and steps == 33 and not (folder / "killed").exists():
                (folder / "killed").write_text(str(controller.samples_seen))
                os.kill(os.getpid(), signal.SIGKILL)
            if steps % settings["every"] == 0:
                told = {"samples": controller.samples_seen, "sizes": controller.batch_sizes.tolist()}
                report(told, controller, net=net, optimizer=optimizer, tally=tally)
    trained = tally.state_dict()["trained"]
    sizes = controller.batch_sizes.tolist()
    if rank == 0:
        times = sorted(set(trained.tolist()))
        (folder / "end.json").write_text(json.dumps({"times": times, "sizes": sizes, "workers": workers}))
    controller.close()


def main(what: str, folder: Path) -> None:
    import ray
    import ray.train
    from ray.cluster_utils import Cluster
    from ray.train.torch import TorchConfig, TorchTrainer

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2 if what == "killed" else 1})
    ray.init(address=cluster.address, log_to_driver=True)

    def room_for_another() -> None:
        while len((folder / "starts.jsonl").read_text().splitlines() if (folder / "starts.jsonl").exists() else []) < 1:
            time.sleep(0.2)
        cluster.add_node(num_cpus=1)

    size: Any = 2
    settings = {"folder": str(folder), "kill": True, "epochs": 3, "every": EVERY}
    if what == "elastic":
        size, settings = (1, 2), settings | {"kill": False, "epochs": 20, "every": 5 * EVERY}
        threading.Thread(target=room_for_another, daemon=True).start()
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=size, elastic_resize_monitor_interval_s=2.0),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "storage"), failure_config=ray.train.FailureConfig(max_failures=2)
        ),
    )
    trainer.fit()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
