"""Lightning's Trainer with the callback."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning import pytorch as pl

from dynamix.integrations.lightning import BalanceCallback
from tests.integrations.jobs import CLIP, QUIET_LIGHTNING, Row, Trail, check_other_batches, followed, loader, sgd

pytestmark = pytest.mark.multiproc


class Job(pl.LightningModule):
    def __init__(self, row: Row, callback: BalanceCallback) -> None:
        super().__init__()
        self.row, self.callback = row, callback
        self.net = row.net()
        self.trail = Trail()

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.net(**batch)["loss"]
        if self.row.tokens:
            return self.callback.controller.weight(loss, count=int((batch["labels"] != -100).sum()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.net)
        self.trail = followed(self.net, optimizer)
        return optimizer


class Stop(pl.Callback):
    """Saves after so many optimizer steps, and ends."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.after and not trainer.should_stop:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(row: Row, folder: Path, resume: bool) -> Trail:
    warnings.filterwarnings("ignore", module="lightning.*")
    callback = BalanceCallback(row.settings(), **row.wrapping(weighting="loss" if row.tokens else "hook"))
    job, path = Job(row, callback), folder / "last.ckpt"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy="ddp" if dist.is_initialized() else "auto",
        max_epochs=row.epochs,
        accumulate_grad_batches=row.accumulate,
        gradient_clip_val=CLIP if row.clip else None,
        callbacks=[callback, *([Stop(row.stop, path)] if row.stop and not resume else [])],
        default_root_dir=folder,
        **QUIET_LIGHTNING,
    )
    trainer.fit(job, loader(row), ckpt_path=path if resume else None)
    return job.trail


def test_batches_of_another_size_are_counted_anew(tmp_path: Path) -> None:
    check_other_batches(fit, tmp_path)
