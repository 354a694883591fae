"""Two policies on the same 8 simulated workers: real training in this one process, time from the simulator's clock.

python examples/virtual_clock.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dynamix_lab.simulator import sample_clusters
from dynamix_lab.virtual.cluster import VirtualCluster

WORKERS, TARGET = 8, 0.95


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9192, 20, generator=generator)
    y = (x[:, :2].prod(1) + x[:, 2:6].sum(1) > 0).long()
    train, held_out = TensorDataset(x[:8192], y[:8192]), (x[8192:], y[8192:])

    def accuracy(net: nn.Module) -> float:
        return float((net(held_out[0]).argmax(1) == held_out[1]).float().mean())

    for policy in ("static", "lb_bsp"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        cluster = VirtualCluster(
            net,
            optimizer,
            F.cross_entropy,
            train,
            clusters=sample_clusters(1, WORKERS, seed=1),
            policy=policy,
            batch_size=16,
            interval=5,
        )
        run = cluster.run(
            steps=600, snapshot_samples=2048, score=accuracy, until=lambda snapshot: snapshot.score >= TARGET
        )
        last = run.snapshots[-1]
        print(
            f"{policy:8} accuracy {last.score:.3f} after {last.time_s:5.1f} virtual seconds, {last.step} steps, "
            f"{run.wait_fraction:.0%} of the time waited"
        )


if __name__ == "__main__":
    main()
