"""A Lightning Trainer with dynamix's callback (marked), on data made in place. Needs the extra `lightning`.

torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dynamix  # dynamix


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, target = batch
        return F.cross_entropy(self.net(inputs), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(4096, 20)
    dataset = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    balance = dynamix.integrations.lightning.BalanceCallback(dynamix.Settings("lb_bsp", interval=5))  # dynamix
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        callbacks=[balance],  # dynamix
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(dataset, batch_size=32, shuffle=True))
    print(f"{balance.controller.samples_seen} samples")


if __name__ == "__main__":
    main()
