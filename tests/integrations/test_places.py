"""Who keeps the place in the data: the controller, whatever a framework's checkpoint holds beside it."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.integrations.accelerate import Settings, prepare
from tests.data.test_stateful_loader import Likewise
from tests.integrations.jobs import as_under_torchrun
from tests.ranks import run_ranks
from tests.union import Script

DATA = TensorDataset(torch.arange(150.0))
TRAIN = list(range(0, 150, 3)) + list(range(1, 150, 3))  # every third sample is held out
SIZES = [[4, 8], [8, 4]]


def _plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=6, sampler=SubsetRandomSampler(TRAIN), **options)


def _accelerated(rank: int, folder: str) -> list[int]:
    """What a job trains that is left after three batches, and one that goes on with Accelerate's checkpoint."""
    as_under_torchrun(rank)
    return [*_part(folder, 3, resume=False), *_part(folder, None, resume=True)]


def _part(folder: str, batches: int | None, *, resume: bool) -> list[int]:
    from accelerate import Accelerator

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
    seen = run_ranks(_accelerated, 2, str(tmp_path), timeout_s=100, frameworks=True)
    assert Counter(i for of_rank in seen for i in of_rank) == Counter(TRAIN)


def _two_epochs(rank: int) -> list[list[int]]:
    """What two jobs train, one after the other, in the loop of docs/frameworks.md; the first ends after some steps."""
    from accelerate import Accelerator

    as_under_torchrun(rank)
    every = []
    for last in (4, 9):  # in mid-epoch, and where it ends
        seen: list[int] = []
        state: dict[str, Any] = {"epoch": 0}
        for steps in (last, None):
            net, accelerator = nn.Linear(1, 1), Accelerator(cpu=True)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            settings = Settings("static", interval=2)
            controller, model, optimizer, loader = prepare(accelerator, settings, net, optimizer, _plain())
            if steps is None:
                controller.load_state_dict(state["controller"])
            for epoch in range(state["epoch"], 2):
                for (x,) in loader:
                    accelerator.backward(model(x[:, None]).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    controller.step()
                    seen += x.int().tolist()
                    if steps is not None and len(seen) >= min(6 * steps, len(TRAIN) // 2):
                        state = {"epoch": epoch + controller.epoch_done, "controller": controller.state_dict()}
                        break
                if "controller" in state and steps is not None:
                    break
            controller.close()
        every.append(seen)
    return every


@pytest.mark.multiproc
def test_a_job_that_saves_where_an_epoch_ends_trains_no_epoch_more() -> None:
    for seen in zip(*run_ranks(_two_epochs, 2, timeout_s=100, frameworks=True), strict=True):
        assert Counter(i for of_rank in seen for i in of_rank) == Counter(2 * TRAIN)


def test_skipping_what_the_controller_has_counted_is_refused() -> None:
    from accelerate import skip_first_batches

    controller = dynamix.Controller("static", 6)
    loader = controller.loader(_plain())
    with pytest.raises(UsageError, match=r"SkipBatchSampler would leave samples out.*without skip_first_batches"):
        next(iter(skip_first_batches(loader, 2)))


def test_what_lightning_puts_around_a_subset_is_looked_through() -> None:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    of_hers = DistributedSamplerWrapper(SubsetRandomSampler(TRAIN), num_replicas=2, rank=1)
    loader = dynamix.Controller("static", 6).loader(DataLoader(DATA, batch_size=6, sampler=of_hers))
    assert sorted(int(i) for (batch,) in loader for i in batch) == sorted(TRAIN)


def test_a_stateful_loader_is_no_plain_one() -> None:
    with pytest.raises(UsageError, match=r"pass the plain DataLoader, before a framework prepares it"):
        dynamix.Controller("static", 6).loader(Likewise(DATA, batch_size=6))
