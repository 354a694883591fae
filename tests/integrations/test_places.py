"""Who keeps the place in the data: the controller, whatever a framework's checkpoint holds beside it."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import pytorch as pl
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.integrations.accelerate import Settings, prepare
from dynamix.integrations.lightning import BalanceCallback
from tests.data.test_stateful_loader import Likewise
from tests.integrations.jobs import QUIET_LIGHTNING, as_under_torchrun
from tests.integrations.test_lightning import Stop
from tests.ranks import run_ranks
from tests.union import Script

DATA = TensorDataset(torch.arange(150.0))
TRAIN = list(range(0, 150, 3)) + list(range(1, 150, 3))  # every third sample is held out
SIZES = [[4, 8], [8, 4]]


def _plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=6, sampler=SubsetRandomSampler(TRAIN), **options)


def _accelerated(rank: int, folder: str, batches: int | None, resume: bool) -> list[int]:
    from accelerate import Accelerator

    as_under_torchrun(rank)
    torch.manual_seed(0)
    accelerator, net = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    settings = Settings(Script(SIZES), interval=2)
    controller, model, optimizer, loader = prepare(accelerator, settings, net, optimizer, _plain(num_workers=1))
    accelerator.register_for_checkpointing(controller)
    if resume:
        accelerator.load_state(folder)
    seen: list[int] = []
    for (x,) in itertools.islice(loader, batches):
        accelerator.backward(model(x[:, None]).mean())
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        seen += x.int().tolist()
    accelerator.save_state(folder)
    controller.close()
    return seen


@pytest.mark.multiproc
def test_accelerates_own_checkpoints_hold_the_place(tmp_path: Path) -> None:
    first = run_ranks(_accelerated, 2, str(tmp_path), 3, False, timeout_s=100)
    rest = run_ranks(_accelerated, 2, str(tmp_path), None, True, timeout_s=100)
    assert Counter(i for seen in (*first, *rest) for i in seen) == Counter(TRAIN)


def test_skipping_what_the_controller_has_counted_is_refused() -> None:
    from accelerate import skip_first_batches

    controller = dynamix.Controller("static", 6)
    loader = controller.loader(_plain())
    with pytest.raises(UsageError, match=r"SkipBatchSampler would leave samples out.*without skip_first_batches"):
        next(iter(skip_first_batches(loader, 2)))


class _Job(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: Any, number: int) -> Any:
        self.seen += batch[0].int().tolist()
        return self.net(batch[0][:, None]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fitted(rank: int, folder: str, resume: bool) -> list[int]:
    as_under_torchrun(rank)
    warnings.filterwarnings("ignore", module="lightning.*")
    callback, job = BalanceCallback(dynamix.Settings(Script(SIZES), interval=2)), _Job()
    path = Path(folder) / "last.ckpt"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        callbacks=[callback, *([] if resume else [Stop(3, path)])],
        default_root_dir=folder,
        **QUIET_LIGHTNING,
    )
    trainer.fit(job, _plain(), ckpt_path=path if resume else None)
    trainer.save_checkpoint(Path(folder) / "final.ckpt")  # the controller is closed by then
    return job.seen


@pytest.mark.multiproc
def test_lightnings_checkpoints_hold_the_place_and_the_subset(tmp_path: Path) -> None:
    first = run_ranks(_fitted, 2, str(tmp_path), False, timeout_s=100)
    rest = run_ranks(_fitted, 2, str(tmp_path), True, timeout_s=100)
    assert Counter(i for seen in (*first, *rest) for i in seen) == Counter(TRAIN)


def test_what_lightning_puts_around_a_subset_is_looked_through() -> None:
    of_hers = DistributedSamplerWrapper(SubsetRandomSampler(TRAIN), num_replicas=2, rank=1)
    loader = dynamix.Controller("static", 6).loader(DataLoader(DATA, batch_size=6, sampler=of_hers))
    assert sorted(int(i) for (batch,) in loader for i in batch) == sorted(TRAIN)


def test_a_stateful_loader_is_no_plain_one() -> None:
    with pytest.raises(UsageError, match=r"pass the plain DataLoader, before a framework prepares it"):
        dynamix.Controller("static", 6).loader(Likewise(DATA, batch_size=6))
