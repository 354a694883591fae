"""Adapts Transformers' Trainer: its plain loader, its loss, the end of epochs, its checkpoints."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from dynamix.data.loader import Epochs
from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.integrations.joining import batches_left, fixed
from dynamix.runtime.controller import Controller

FILE = "controller.pt"  # in a checkpoint's folder
IGNORED = -100  # label of tokens that do not count


def require_tokens_of_all(trainer: Trainer, weighting: str | None) -> bool:
    """Whether losses are divided by `num_items_in_batch`. Raises `ConfigError` if that counts only one rank's tokens,
    or if a user's own `compute_loss` may or may not divide and `weighting` does not say which."""
    given = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)
    if weighting is not None:
        given = weighting == "given"
    elif given and type(trainer).compute_loss is not Trainer.compute_loss:
        allowed = "'given' where compute_loss divides by num_items_in_batch, 'hook' where it is a mean over samples"
        raise ConfigError("weighting", None, allowed, "TrainerBalance(trainer, settings, weighting=...)")
    if given and not trainer.args.average_tokens_across_devices:
        fix = "leave it out: losses are then divided by the tokens of all ranks"
        raise ConfigError("average_tokens_across_devices", False, "True where losses are divided by a count", fix)
    return given


def require_counted(batches: list[Any], items: Any, *, given: bool) -> None:
    """Raise `UsageError` if losses cannot be weighted as required: by `items`, or as means over samples."""
    if given and batches and items is None:
        fix = "give batches `labels`, or set model.accepts_loss_kwargs = False"
        raise UsageError(f"losses are divided by num_items_in_batch, but the Trainer found nothing to count: {fix}")
    if not given and any(_skips(batch.get("labels")) for batch in batches if isinstance(batch, dict)):
        why = f"labels of {IGNORED} do not count, so the mean of a batch is not over all of its samples"
        fix = "let the model divide by num_items_in_batch (accepts_loss_kwargs = True), or give a compute_loss_func"
        raise UsageError(f"{why}: {fix}")


def _skips(labels: Any) -> bool:
    return isinstance(labels, torch.Tensor) and bool((labels == IGNORED).any())


def plain_loader(trainer: Trainer, get_train_dataloader: Any) -> Any:
    """The training loader before Accelerate distributes its samples."""
    trainer.accelerator.prepare = lambda loader: loader
    try:
        return get_train_dataloader()
    finally:
        del trainer.accelerator.prepare


def masked(batch: Any) -> Any:
    """A batch in which no token counts."""
    return {
        name: torch.full_like(value, IGNORED) if name in ("labels", "shift_labels") else value
        for name, value in batch.items()
    }


def save(controller: Controller, args: Any, step: int) -> None:
    """Add the controller's state to the checkpoint of `step`. A collective call."""
    state = controller.state_dict(gather=True)
    if args.should_save:
        torch.save(state, Path(args.output_dir) / f"checkpoint-{step}" / FILE)


def load(controller: Controller, checkpoint: str) -> None:
    """Continue from a checkpoint. Raises `StateError` if it was made without the adapter."""
    path = Path(checkpoint) / FILE
    if not path.exists():
        fix = "resume from a checkpoint that was made with the adapter, or begin anew"
        raise StateError(f"{checkpoint} has no {FILE}, so the samples that were used are unknown: {fix}")
    controller.load_state_dict(torch.load(path, weights_only=True))


def steps_of(checkpoint: str) -> int:
    """Optimizer steps before a checkpoint."""
    return int(TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).global_step)


def enough(epochs: Epochs, most: int, pieces: int, *, done: int, wanted: float, moves: bool) -> int:
    """Rounds of an epoch to report, so that the Trainer runs long enough after `done` steps of perhaps other sizes.

    most   most rounds of an epoch from now on. The Trainer divides `done` by the reported number to find its epoch, and
           ends after that number times `wanted`
    """
    cut = epochs.loader.cut
    left = most if moves else batches_left(epochs) // pieces
    whole = cut.epoch + cut.finished
    needed = done + left + max(0.0, wanted - cut.epoch - 1) * most
    return max(most, done // (whole + 1) + 1, math.ceil(needed / wanted))


class Idle:
    """A learning-rate scheduler that something else steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *_: Any) -> None:
        """Does nothing: the schedule counts samples."""


class Steered:
    """A trainer with a loader made by `joined`, and with hooks on its loss and steps.

    given      whether losses are divided by the tokens of all ranks
    loss       of the batch of the last backward pass, as the model returned it
    weighting  as in `Controller.wrap`; None: by the model's arguments
    """

    def __init__(self, trainer: Trainer, joined: Callable[..., Epochs], weighting: str | None) -> None:
        self.given = require_tokens_of_all(trainer, weighting)
        self.trainer, self.loss, self._joined = trainer, None, joined
        self._resumed: str | None = None
        self._epochs: Epochs | None = None
        replaced = {"train": self._train, "create_scheduler": self._create_scheduler}
        replaced |= {"get_train_dataloader": self._dealt, "get_batch_samples": self._counted}
        self._own = {name: getattr(trainer, name) for name in replaced}
        for name, method in replaced.items():
            setattr(trainer, name, method)
        self._backward = trainer.accelerator.backward
        trainer.accelerator.backward = self._seen
        trainer.args.ignore_data_skip = True

    def _seen(self, loss: Any, **given: Any) -> None:
        self._backward(loss, **given)
        parts = 1 if self.given else self.trainer.current_gradient_accumulation_steps  # the Trainer divides by these
        self.loss = loss.detach() * parts

    def _train(self, resume_from_checkpoint: Any = None, **given: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.trainer.args.output_dir)
        self._resumed = resume_from_checkpoint or None
        return self._own["train"](resume_from_checkpoint=resume_from_checkpoint, **given)

    def _dealt(self) -> Epochs:
        args, plain = self.trainer.args, plain_loader(self.trainer, self._own["get_train_dataloader"])
        seed = args.seed if args.data_seed is None else args.data_seed
        mask = masked if self.given else None
        return self._joined(plain, accumulate=args.gradient_accumulation_steps, seed=seed, placeholder=mask)

    def _counted(self, *args: Any) -> Any:
        batches, items = self._own["get_batch_samples"](*args)
        require_counted(batches, items, given=self.given)
        return batches, items

    def measured(self, epochs: Epochs, controller: Controller) -> Epochs:
        """The loader at the job's position, with a length that lets the trainer run long enough.

        Loads the state first: it has the global batch by which steps are counted.
        """
        if self._resumed:
            load(controller, self._resumed)
        args, pieces, wanted = self.trainer.args, controller.accumulate, self.trainer.args.num_train_epochs
        self._moves = not fixed(controller)
        most = len(epochs) // pieces  # rounds of an epoch
        each = epochs.loader.cut.dataset_size / controller.base_batch if self._moves else most
        self._nominal = args.max_steps if args.max_steps > 0 else math.ceil(wanted * each)
        if self._resumed:
            most = enough(epochs, most, pieces, done=steps_of(self._resumed), wanted=wanted, moves=self._moves)
        steps = None if args.max_steps > 0 else pieces * most
        self._epochs = Epochs(epochs.loader, steps=lambda: steps)
        return self._epochs

    def _create_scheduler(self, num_training_steps: int, **given: Any) -> Any:
        return self._own["create_scheduler"](num_training_steps=self._nominal, **given)

    def begin(self, controller: Controller) -> None:
        """Begin or resume training. If the global batch moves, the schedule counts samples from now on."""
        trainer = self.trainer
        if self._moves and not isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            controller.scheduler(getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler))
            trainer.lr_scheduler = Idle(trainer.lr_scheduler)

    def stepped(self, controller: Controller, state: Any, control: Any) -> None:
        """After an optimizer step: set the epoch by samples, and end it when its samples are used."""
        assert self._epochs is not None
        state.epoch = self._epochs.loader.cut.epoch + controller.progress
        control.should_epoch_stop = control.should_epoch_stop or controller.epoch_done
        args = self.trainer.args
        ended = controller.stopping or (args.max_steps <= 0 and state.epoch >= args.num_train_epochs)
        if ended and not control.should_training_stop:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy == "steps"

    def end(self) -> None:
        """End training. DDP cannot drop a closed controller's hook, so the next training gets a new DDP."""
        self.trainer.model_wrapped = self.trainer.model
