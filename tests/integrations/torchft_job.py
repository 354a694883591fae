"""A replica of a job under torchft, and the lighthouse they meet at: what `test_torchft` starts.

Writes down which samples it trained in every step that was committed, and its weights.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dynamix.integrations.replicas import ReplicaShares
from dynamix.integrations.torchft import WeightedManager

SAMPLES, BATCH, MICRO, LR = 1500, 60, 6, 0.05
TIMEOUT = datetime.timedelta(seconds=60)


def data() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randn(SAMPLES, 3, dtype=torch.float64)
    return x, y, nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def joined(name: str, lighthouse: str, net: nn.Module, optimizer: Any, *, together: int) -> Any:
    """Its manager; `together` replicas begin, and one can go on alone where that is 1."""
    from torchft import Manager, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=together,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="127.0.0.1",
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
    )
    manager.store = store  # as long as the manager
    return WeightedManager(manager, ReplicaShares(SAMPLES, BATCH, interval=2))


def gradients(name: str, lighthouse: str, folder: Path, epochs: int, dies_at: int, each_s: float) -> None:
    import torchft.local_sgd  # noqa: F401  before the gate: it takes seconds
    from torchft import DistributedDataParallel, Optimizer

    x, y, net = data()
    inner = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    (folder / f"{name}.here").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(0.02)
    manager = joined(name, lighthouse, net, inner, together=1)
    model, optimizer, shares = DistributedDataParallel(manager, net), Optimizer(manager, inner), manager.shares
    with (folder / f"{name}.jsonl").open("a") as lines:
        while shares.epoch < epochs:
            optimizer.zero_grad()
            before = manager.current_step()  # one that joins is where the others are
            epoch, picked = shares.epoch, shares.deal(least=1)
            time.sleep(each_s * len(picked))
            loss = F.mse_loss(model(x[picked]), y[picked])
            if manager.current_step() == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            mine = picked if shares.weight else []
            told = {"step": manager.current_step(), "epoch": epoch, "picked": mine, "at": time.time()}
            lines.write(json.dumps(told | {"done": manager.current_step() > before}) + "\n")
            lines.flush()
    torch.save(net.state_dict(), folder / f"{name}.pt")
    manager.shutdown(wait=False)


def apart(name: str, lighthouse: str, folder: Path, epochs: int, way: str, each_s: float) -> None:
    from torchft.local_sgd import DiLoCo, LocalSGD

    x, y, net = data()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    manager = joined(name, lighthouse, net, optimizer, together=2)
    rounds: list[dict[str, Any]] = []
    optimizer.register_step_post_hook(lambda *_: rounds[-1].update(own=_flat(net)))  # before torchft's, which meets
    if way == "local":
        averaging: Any = LocalSGD(manager, net, optimizer, sync_every=1)
    else:
        averaging = DiLoCo(manager, [net], optimizer, torch.optim.SGD(net.parameters(), lr=1.0), sync_every=1)
    with averaging:
        while manager.shares.epoch < epochs:
            rounds.append({"picked": [], "steps": 0, "epoch": manager.shares.epoch})
            for picked in manager.pieces(averaging, MICRO):
                optimizer.zero_grad()
                F.mse_loss(net(x[picked]), y[picked]).backward()
                time.sleep(each_s * len(picked))
                rounds[-1]["picked"] += picked
                rounds[-1]["steps"] += 1
                optimizer.step()
            rounds[-1]["met"] = _flat(net)
    torch.save(rounds, folder / f"{name}.pt")
    manager.shutdown(wait=False)


def _flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


def meeting_place(folder: Path, replicas: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=replicas, join_timeout_ms=100, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    new = folder / "lighthouse.new"
    new.write_text(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    new.replace(folder / "lighthouse")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    task, place, *rest = sys.argv[1:]
    if task == "lighthouse":
        meeting_place(Path(place), int(rest[0]))
    at = (Path(place) / "lighthouse").read_text()
    if task == "gradients":
        gradients(rest[0], at, Path(place), int(rest[1]), int(rest[2]), float(rest[3]))
    else:
        apart(rest[0], at, Path(place), int(rest[1]), task, float(rest[2]))
