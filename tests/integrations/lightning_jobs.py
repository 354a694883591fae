"""Jobs of Lightning's Trainer with the callback; in a file of their own, because Lightning is imported for seconds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.integrations.lightning import BalanceCallback
from tests.integrations.jobs import CLIP, QUIET_LIGHTNING, Row, Trail, as_under_torchrun, followed, loader, sgd
from tests.ranks import refusal


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
    trainer.save_checkpoint(folder / "final.ckpt")  # the controller is closed by then
    return job.trail


class Manual(pl.LightningModule):
    """Steps its optimizers itself: that of the whole net, or body and head in turn, each with a pass of its own."""

    def __init__(self, *, in_turn: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization, self.in_turn = False, in_turn
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def training_step(self, batch: Any, number: int) -> Any:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.zero_grad()
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        parts = (self.net[0], self.net[2]) if self.in_turn else (self.net,)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


def _furthest(in_turn: bool, folder: str) -> float:
    """How far the net comes from one that was trained in this process on the unions."""
    dataset = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)
    job, alone = Manual(in_turn=in_turn), Manual(in_turn=in_turn)
    held = {"min_batch_size": [12, 4], "max_batch_size": [12, 4]}
    callback = BalanceCallback(dynamix.Settings("lb_bsp", batch_size=8, **held))
    own: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, **QUIET_LIGHTNING}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], default_root_dir=folder, **own)
    trainer.fit(job, DataLoader(dataset, batch_size=8))
    applied = alone.configure_optimizers()
    for x, y in DataLoader(dataset, batch_size=16):
        for optimizer in applied:
            alone.zero_grad()
            F.cross_entropy(alone.net(x), y).backward()
            optimizer.step()
    pairs = zip(job.net.parameters(), alone.net.parameters(), strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


class _Budgeted(pl.LightningModule):
    """Trains until a budget of two epochs is spent."""

    def __init__(self, callback: BalanceCallback) -> None:
        super().__init__()
        self.callback, self.net, self.samples = callback, nn.Linear(6, 3), 0

    def on_train_start(self) -> None:
        self.callback.controller.budget(epochs=2)

    def training_step(self, batch: Any, number: int) -> Any:
        self.samples += len(batch[0])
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Pair(pl.LightningModule):
    """Trains on batches of a labelled and an unlabelled loader."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, number: int) -> Any:
        return sum(self.net(x).square().mean() for (x,) in batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit_several(folder: str) -> list[str]:
    """What becomes of a list and a combination of loaders."""
    loaders = [DataLoader(TensorDataset(torch.randn(n, 4)), batch_size=4, shuffle=True) for n in (48, 64)]
    named, told = dict(zip(("labelled", "unlabelled"), loaders, strict=True)), []
    for given in (loaders, CombinedLoader(named, "min_size")):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=1,
            callbacks=[BalanceCallback(dynamix.Settings("lb_bsp", batch_size=4))],
            default_root_dir=folder,
            **QUIET_LIGHTNING,
        )
        told.append(refusal(UsageError, trainer.fit, _Pair(), given))
    return told


def on_two_ranks(rank: int, folder: str) -> tuple[list[float], list[str]]:
    as_under_torchrun(rank)
    warnings.filterwarnings("ignore", module="lightning.*")
    return [_furthest(in_turn, folder) for in_turn in (False, True)], _fit_several(folder)


def spent(folder: Path) -> int:
    """Samples that a job trains on until its budget of two epochs of 48 is spent."""
    warnings.filterwarnings("ignore", module="lightning.*")
    callback = BalanceCallback(dynamix.Settings("lb_bsp", batch_size=8))
    job = _Budgeted(callback)
    alone: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    trainer = pl.Trainer(**alone, max_epochs=-1, callbacks=[callback], default_root_dir=folder, **QUIET_LIGHTNING)
    dataset = TensorDataset(torch.randn(48, 6), torch.arange(48) % 3)
    trainer.fit(job, DataLoader(dataset, batch_size=8, shuffle=True))
    return job.samples
