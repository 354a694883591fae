"""One run of a peer: ranks in its own interpreter, everything else as in the comparison of policies."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD

from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import Emulation
from dynamix_lab.harness.channel import Message
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.launch import MOST_STEPS, Launch, LaunchSettings
from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.peers.jobs.job import built
from dynamix_lab.peers.kinds import Peer, rate_of, split_name
from dynamix_lab.tasks import Workload

JOBS = Path(__file__).parent / "jobs"
START_S = 240.0  # four ranks with all their helpers import torch
SILENCE_S = 90.0  # after that; longer than any peer's own timeout
DEATH_S = 20.0


def check_portable(workload: Workload) -> None:
    """Raises `ConfigError` for a workload that an interpreter without dynamix cannot train: its model's layers and its
    loss must be torch's own, its optimizer SGD with momentum."""
    model = workload.make_model(0)
    foreign = {type(m).__qualname__ for m in model.modules() if getattr(nn, type(m).__name__, None) is not type(m)}
    if not foreign and not _can_be_described(model):
        foreign = {"layers whose arguments cannot be read off them"}
    optimizer = workload.make_optimizer(model.parameters())
    foreign |= {type(optimizer).__qualname__} - {SGD.__qualname__}
    foreign |= {workload.loss.__qualname__} if getattr(nn.functional, workload.loss.__name__, None) is None else set()
    if foreign:
        allowed = "one whose model, loss and optimizer (SGD) are torch's own, such as mnist1d or teacher"
        raise ConfigError("workload", f"{workload.name} ({', '.join(sorted(foreign))})", allowed, "take another")


def described(module: nn.Module) -> list[Any]:
    """What `jobs.job.built` makes a network of torch's own layers from, as JSON. Weights are not in it.

    >>> described(nn.Sequential(nn.Flatten(), nn.ReLU()))
    ['Sequential', [['Flatten', {'start_dim': 1, 'end_dim': -1}], ['ReLU', {'inplace': False}]]]
    """
    if isinstance(module, nn.Sequential):
        return ["Sequential", [described(layer) for layer in module]]
    given: dict[str, Any] = {}
    for name in inspect.signature(type(module)).parameters:
        value = getattr(module, name, None)
        if name == "bias" and not isinstance(value, bool):
            value = value is not None  # a layer keeps the tensor under the argument's name
        if isinstance(value, (bool, int, float, str, list, tuple)):
            given[name] = value
    return [type(module).__name__, given]


def _can_be_described(model: nn.Module) -> bool:
    try:
        return repr(built(described(model))) == repr(model)
    except TypeError:  # an argument that the layer does not keep
        return False


class OwnLaunch(Launch):
    """A run of one of dynamix's own policies, also with another global batch or learning rate: `dynamix-128-lr0.1`."""

    def _config(self, scratch: Path) -> dict[str, Any]:
        config = super()._config(scratch)
        (name,) = config["runs"]
        policy, total = split_name(name)
        files = {name: policy} if policy != name else {}
        begins = {"batch_size": total // self.hosts.scenario.workers, "learning_rate": rate_of(name)}
        return {**config, **begins, "policy_files": files}


class PeerLaunch(Launch):
    """One start of a peer's ranks. They speak our own messages (`jobs/job.py`), so clock, snapshots, scoring, target
    and censoring are those of the runs of dynamix beside it.

    Raises `WorkerLostError` when a rank fails, or nothing is heard of rank 0 for 90 s.
    """

    def __init__(
        self,
        peer: Peer,
        python: Path,
        settings: LaunchSettings,
        seed: int,
        workload: Workload,
        hosts: Emulation,
        folder: RunFolder,
        display: Display,
        runs: list[PolicyRun],
    ) -> None:
        super().__init__(settings, seed, workload, hosts, folder, display, runs)
        self.peer, self.python = peer, python
        self._heard_s, self._patience_s = time.monotonic(), START_S

    def _start_ranks(self, config: Path) -> None:
        command = [str(self.python), "-P", "-m", f"{JOBS.name}.{self.peer.environment}", str(config)]
        self.hosts.launch(command, env={"PYTHONPATH": str(JOBS.parent)})
        self._heard_s = time.monotonic()

    def _config(self, scratch: Path) -> dict[str, Any]:
        settings, workers = self.settings, self.hosts.scenario.workers
        data = self.workload.make_data(self.seed, train=settings.train_samples(), test=settings.test_samples()).train
        model = self.workload.make_model(self.seed)
        torch.save(model.state_dict(), scratch / "weights.pt")
        np.savez(scratch / "task.npz", inputs=data.inputs.numpy(), targets=data.targets.numpy())
        (scratch / "board").write_bytes(bytes(8 * (1 + 2 * workers)))
        group = self.workload.make_optimizer(model.parameters()).param_groups[0]
        common = super()._config(scratch)
        kept = ("socket", "snapshots", "seed", "snapshot_samples", "warm_up_steps")
        return {
            **{name: common[name] for name in kept},
            "name": self.peer.name,
            "global_batch": self.peer.total,
            "settings": self.peer.settings(self.hosts.scenario),
            "learning_rate": group["lr"] if self.peer.learning_rate is None else self.peer.learning_rate,
            "momentum": group["momentum"],
            "max_steps": settings.max_steps() if settings.quick else MOST_STEPS,
            "data": str(scratch / "task.npz"),
            "layers": described(model),
            "weights": str(scratch / "weights.pt"),
            "loss": self.workload.loss.__name__,
            "board": str(scratch / "board"),
            "meeting": str(scratch / "meeting"),
            "events": str(scratch / "none.jsonl"),
            "about": str(self.hosts.run_dir / "rank0.json"),
        }

    def _next_message(self) -> Message | None:
        try:
            return super()._next_message()
        except WorkerLostError:
            # The line ends with a rank's first exception, its exit code comes seconds later on a busy machine.
            deadline = time.monotonic() + DEATH_S
            while time.monotonic() < deadline and not any(self.hosts.poll()):
                time.sleep(0.1)
            self._check()
            raise

    def _handle(self, message: Message | None) -> bool:
        now = time.monotonic()
        if message is not None:
            self._heard_s, self._patience_s = now, SILENCE_S
        elif now - self._heard_s > self._patience_s:
            raise WorkerLostError(
                f"{self.peer.name} said nothing for {self._patience_s:.0f} s; see {self.hosts.run_dir}"
            )
        return super()._handle(message)
