"""Two replicas under torchft whose speeds differ: unequal shares, exact gradients, and at most the last step is lost.

Each replica is its own process, without torchrun; kill one and start it again. Needs `pip install ".[torchft]"`, in
dynamix's source tree. First start torchft's lighthouse, then a replica in each of two terminals:

torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000
TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_replicas.py r0
TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_replicas.py r1 --slow 0.002

With --local, torchft's LocalSGD: each replica takes local steps, and the slow one fewer.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.local_sgd import LocalSGD

from dynamix.integrations.replicas import ReplicaShares
from dynamix.integrations.torchft import WeightedManager


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--slow", type=float, default=0.0005, help="seconds a sample")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--local", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(3000, 20)
    y = (x[:, :5].sum(1) > 0).long()
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    manager = connected(args.name, net, sgd, ReplicaShares(len(x), 96))
    shares = manager.shares

    def train(model: nn.Module, optimizer: Any, picked: list[int]) -> None:
        loss = F.cross_entropy(model(x[picked]), y[picked])
        time.sleep(args.slow * len(picked))
        loss.backward()
        optimizer.step()
        print(f"epoch {shares.epoch}: {len(picked)} samples, loss {loss.item():.3f}, shares {shares.sizes.tolist()}")

    if args.local:
        with LocalSGD(manager, net, sgd, sync_every=1) as averaging:
            while shares.epoch < args.epochs:
                for picked in manager.pieces(averaging, 8):
                    sgd.zero_grad()
                    train(net, sgd, picked)
    else:
        model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, sgd)
        while shares.epoch < args.epochs:
            optimizer.zero_grad()  # here torchft asks which replicas are present
            train(model, optimizer, shares.deal(least=1))
    manager.shutdown(wait=False)


def connected(name: str, net: nn.Module, optimizer: torch.optim.Optimizer, shares: ReplicaShares) -> Any:
    """torchft's manager as in its own examples, with `use_async_quorum=False`, inside dynamix's."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=name,
        hostname="localhost",
    )
    manager.keeps = store  # keeps it alive as long as the manager
    return WeightedManager(manager, shares)


if __name__ == "__main__":
    main()
