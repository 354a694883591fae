"""Transformers' Trainer: one line after it is made, and no other change. Needs the extra `transformers`."""

from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from dynamix.data.loader import Epochs
from dynamix.integrations.hf_trainer import Steered, save
from dynamix.integrations.joining import join, require_steps_alike
from dynamix.runtime.controller import Controller
from dynamix.runtime.settings import Settings


class TrainerBalance(TrainerCallback):
    """Gives every worker of a `Trainer` its own batch size; its `controller` exists while `trainer.train()` runs.

        trainer = Trainer(model, args, train_dataset=data)
        TrainerBalance(trainer, dynamix.Settings("lb_bsp"))
        trainer.train()

    Losses divided by `num_items_in_batch` carry their weights, by tokens; others are weighted by samples.
    Checkpoints hold the place in the epoch, so `ignore_data_skip` is set. If the global batch moves, epochs and the
    learning rate's schedule count samples. `options` are those of `Controller.wrap`.
    """

    controller: Controller

    def __init__(self, trainer: Trainer, settings: Settings, **options: Any) -> None:
        require_steps_alike(settings, "Transformers' Trainer", "gathers in some steps")
        self.settings, self.options = settings, options
        self.steered = Steered(trainer, self._join, options.get("weighting"))
        trainer.add_callback(self)

    def _join(self, plain: DataLoader[Any], **known: Any) -> Epochs:
        self.controller, epochs = join(self.settings, plain, longest=True, **known)
        return self.steered.measured(epochs, self.controller)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, weighting = self.steered.trainer, "given" if self.steered.given else "hook"
        known = {"weighting": weighting, "scaler": trainer.accelerator.scaler}
        self.controller.wrap(trainer.model_wrapped, trainer.optimizer, **known | self.options)
        self.steered.begin(self.controller)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.controller.step(loss=self.steered.loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.controller.step(loss=self.steered.loss)
        self.steered.stepped(self.controller, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        save(self.controller, args, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.controller.close()
        self.steered.end()
