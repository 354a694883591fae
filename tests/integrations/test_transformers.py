"""Transformers' Trainer with the adapter: every row exact, each sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dynamix
from dynamix.errors import ConfigError, UsageError
from tests.integrations.jobs import (
    BATCH,
    CLIP,
    LIMIT,
    LR,
    SAMPLES,
    Pairs,
    Row,
    Trail,
    as_under_torchrun,
    check,
    followed,
    sgd,
)
from tests.integrations.test_loops import ROWS
from tests.ranks import run_ranks
from tests.union import Script

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.multiproc


def trainer_of(row: Row, folder: Path, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=row.accumulate,
        max_grad_norm=CLIP if row.clip else 0.0,
        num_train_epochs=row.epochs,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        **options,
    )
    net = row.net()
    optimizer = sgd(net)
    data = Pairs(tokens=row.tokens)
    trainer = transformers.Trainer(net, args, train_dataset=data, optimizers=(optimizer, None))
    trainer.trail = followed(net, optimizer)
    return trainer


class Stop(transformers.TrainerCallback):
    """Saves after so many optimizer steps, and ends."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            control.should_save = control.should_training_stop = True


def _train(row: Row, folder: Path, *, resume: bool) -> Trail:
    from dynamix.integrations.transformers import TrainerBalance

    trainer = trainer_of(row, folder)
    TrainerBalance(trainer, row.settings())
    if row.stop and not resume:
        trainer.add_callback(Stop(row.stop))
    trainer.train(resume_from_checkpoint=True if resume else None)
    return trainer.trail


def train_rows(rank: int, folder: Path) -> list[Trail]:
    as_under_torchrun(rank)
    trails = []
    for number, row in enumerate(ROWS):
        own = folder / str(number)
        trail = _train(row, own, resume=False)
        if row.stop:
            rest = _train(row, own, resume=True)
            moved = [(n + len(trail.samples), p) for n, p in rest.steps]
            trail = Trail(trail.samples + rest.samples, trail.steps + moved)
        trails.append(trail)
    return trails


def test_every_row_is_exact(tmp_path: Path) -> None:
    by_rank = run_ranks(train_rows, 2, tmp_path, timeout_s=250, group_timeout_s=100)
    for row, *trails in zip(ROWS, *by_rank, strict=True):
        assert check(row, trails) <= LIMIT, row


def test_a_schedule_ends_with_the_samples_where_the_batch_moves(tmp_path: Path) -> None:
    from dynamix.integrations.transformers import TrainerBalance

    trainer = trainer_of(Row(), tmp_path)
    trainer.args.lr_scheduler_type = "linear"
    policy = Script([[16], [24], [32]])
    settings = dynamix.Settings(policy, interval=2, max_batch_size=32, global_batch="adaptive", lr_rule="none")
    TrainerBalance(trainer, settings)
    trainer.train()
    assert trainer.state.epoch == 2
    assert trainer.state.global_step < 2 * SAMPLES // BATCH
    assert 0 <= trainer.optimizer.param_groups[0]["lr"] < 0.06 * LR


def test_a_mean_over_fewer_labels_than_samples_tell_is_refused(tmp_path: Path) -> None:
    from dynamix.integrations.transformers import TrainerBalance

    trainer = trainer_of(Row(tokens=True), tmp_path)
    trainer.model_accepts_loss_kwargs = False
    TrainerBalance(trainer, dynamix.Settings("static"))
    with pytest.raises(UsageError, match="accepts_loss_kwargs"):
        trainer.train()
    with pytest.raises(ConfigError, match="Accelerate or Fabric"):
        TrainerBalance(trainer, dynamix.Settings("static", micro_batch=4))
