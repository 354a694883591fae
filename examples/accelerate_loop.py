"""An Accelerate script with dynamix's few lines (marked), on data made in place. Needs the extra `accelerate`.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dynamix.integrations.accelerate import Settings, prepare  # dynamix


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(4096, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)

    controller, model, optimizer, loader = prepare(accelerator, Settings("lb_bsp"), net, optimizer, loader)  # dynamix
    for epoch in range(3):
        for inputs, target in loader:
            loss = F.cross_entropy(model(inputs), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)  # dynamix
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, batch sizes {controller.batch_sizes.tolist()}")
    controller.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
