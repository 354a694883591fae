"""Ray Train: checkpoints of a plain loop in the workers' function, and resuming from them after a failure.

    controller = dynamix.Controller("lb_bsp", batch_size=64)
    loader = controller.loader(DataLoader(dataset, batch_size=64, shuffle=True))  # not ray's prepare_data_loader
    model = ray.train.torch.prepare_model(net)
    controller.wrap(model, optimizer)
    resume(controller, net=net, optimizer=optimizer)
    ...
    if controller.checkpoint_due(every=100):  # after every controller.step(), on every worker
        report({"loss": loss.item()}, controller, net=net, optimizer=optimizer)

Ray restarts workers as `FailureConfig` allows.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from dynamix.runtime.controller import Controller

FILE = "dynamix.pt"


def report(metrics: dict[str, Any], controller: Controller, **parts: Any) -> None:
    """`ray.train.report` with a checkpoint of the controller and of `parts`: objects with a `state_dict`, by name.

    A collective call, at a step at which the controller can be saved (`checkpoint_due`). The first worker writes.
    """
    import ray.train

    state = {"controller": controller.state_dict(gather=True), **{n: part.state_dict() for n, part in parts.items()}}
    with tempfile.TemporaryDirectory() as folder:
        if controller.rank == 0:
            torch.save(state, Path(folder, FILE))
        ray.train.report(metrics, checkpoint=None if controller.rank else ray.train.Checkpoint.from_directory(folder))


def resume(controller: Controller, **parts: Any) -> bool:
    """Load the last state saved by `report`, on every worker; returns whether there was one. `parts` as in `report`."""
    import ray.train

    if (checkpoint := ray.train.get_checkpoint()) is None:
        return False
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, FILE), map_location="cpu", weights_only=True)
    for name, part in {"controller": controller, **parts}.items():
        part.load_state_dict(state[name])
    return True
