"""A Lightning Fabric script with dynamix's few lines (marked), on data made in place. Needs the extra `fabric`.

torchrun --nproc-per-node 2 examples/fabric.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dynamix.integrations.fabric import Settings, setup  # dynamix


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)

    x = torch.randn(4096, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=1)

    controller, model, optimizer, loader = setup(fabric, Settings("lb_bsp"), net, optimizer, loader)  # dynamix
    for epoch in range(3):
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)  # dynamix
        fabric.print(f"epoch {epoch}: loss {loss.item():.3f}, batch sizes {controller.batch_sizes.tolist()}")
    controller.close()


if __name__ == "__main__":
    main()
