"""Transformers' Trainer with the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dynamix
from dynamix.errors import ConfigError, UsageError
from tests.integrations.jobs import (
    BATCH,
    CLIP,
    LR,
    QUIET_TRANSFORMERS,
    SAMPLES,
    Pairs,
    Row,
    Trail,
    check_other_batches,
    followed,
    sgd,
)
from tests.union import Script

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.multiproc


def trainer_of(row: Row, folder: Path, **options: Any) -> Any:
    known: dict[str, Any] = {
        **QUIET_TRANSFORMERS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": row.accumulate,
        "max_grad_norm": CLIP if row.clip else 0.0,
        "num_train_epochs": row.epochs,
        "lr_scheduler_type": "constant",
    }
    args = transformers.TrainingArguments(str(folder), **known | options)
    net = row.net()
    optimizer = sgd(net)
    data = Pairs(tokens=row.tokens)
    trainer = transformers.Trainer(net, args, train_dataset=data, optimizers=(optimizer, None))
    trainer.trail = followed(net, optimizer)
    return trainer


def stop(after: int) -> Any:
    """A callback that saves after so many optimizer steps, and ends."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == after:
                control.should_save = control.should_training_stop = True

    return Stop()


def train(row: Row, folder: Path, resume: bool) -> Trail:
    from dynamix.integrations.transformers import TrainerBalance

    trainer = trainer_of(row, folder)
    TrainerBalance(trainer, row.settings(), **row.wrapping())
    if row.stop and not resume:
        trainer.add_callback(stop(row.stop))
    trainer.train(resume_from_checkpoint=True if resume else None)
    return trainer.trail


def test_batches_of_another_size_are_counted_anew(tmp_path: Path) -> None:
    check_other_batches(train, tmp_path)


def test_a_schedule_stays_that_of_the_global_batch(tmp_path: Path) -> None:
    """Resumed with twice the loader's batch size, as with twice as many ranks: the same steps, down to a rate of 0."""
    from dynamix.integrations.transformers import TrainerBalance

    for batch_size in (BATCH, 2 * BATCH):
        trainer = trainer_of(Row(), tmp_path, per_device_train_batch_size=batch_size, lr_scheduler_type="linear")
        TrainerBalance(trainer, dynamix.Settings("static", min_batch_size=2))
        if batch_size == BATCH:
            trainer.add_callback(stop(25))
            trainer.train()
    with pytest.warns(RuntimeWarning, match=f"goes on with a global batch of {BATCH} samples"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.epoch == 2
    assert trainer.state.global_step == 2 * round(SAMPLES / BATCH)
    assert trainer.optimizer.param_groups[0]["lr"] == 0


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


def test_a_stop_that_was_asked_for_ends_training(tmp_path: Path) -> None:
    from dynamix.integrations.transformers import TrainerBalance

    class Asks(transformers.TrainerCallback):
        """After three steps, as a signal handler would."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                balance.controller.request_stop()

    trainer = trainer_of(Row(), tmp_path)
    trainer.add_callback(Asks())
    balance = TrainerBalance(trainer, dynamix.Settings("static"))
    trainer.train()
    assert 3 <= trainer.state.global_step <= 5


def test_a_mean_over_fewer_labels_than_samples_tell_is_refused(tmp_path: Path) -> None:
    from dynamix.integrations.transformers import TrainerBalance

    trainer = trainer_of(Row(tokens=True), tmp_path)
    trainer.model_accepts_loss_kwargs = False
    TrainerBalance(trainer, dynamix.Settings("static"))
    with pytest.raises(UsageError, match="accepts_loss_kwargs"):
        trainer.train()
    with pytest.raises(ConfigError, match="Accelerate or Fabric"):
        TrainerBalance(trainer, dynamix.Settings("static", micro_batch=4))
