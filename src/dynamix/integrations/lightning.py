"""Lightning's Trainer: one callback, and no other change. Needs the extra `lightning`."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dynamix.data.loader import Epochs
from dynamix.integrations.joining import (
    batches_left,
    fixed,
    join,
    recount,
    require_kept_loader,
    require_steps_alike,
    several_loaders,
)
from dynamix.runtime.controller import Controller
from dynamix.runtime.settings import Settings


class BalanceCallback(Callback):
    """Gives every worker of a `Trainer` its own batch size; its `controller` exists from the first training epoch on.

        trainer = Trainer(strategy="ddp", callbacks=[BalanceCallback(dynamix.Settings("lb_bsp"))])

    The controller sets the training loader's batches, whatever sampler Lightning would choose. Checkpoints hold the
    place in the epoch. Batches per optimizer step are `accumulate_grad_batches`. If the global batch moves, the loader
    has no length, like an `IterableDataset`. With `max_epochs=-1` and `controller.budget(...)`, called in the module's
    `on_train_start`, the fit ends when the budget is spent. `options` are those of `Controller.wrap`. Raises
    `UsageError` for several training loaders, such as a dict of them.
    """

    controller: Controller

    def __init__(self, settings: Settings, **options: Any) -> None:
        require_steps_alike(settings, "Lightning", "exchanges after every batch")
        self.settings, self.options = settings, options
        self._state, self._final = dict[str, Any](), dict[str, Any]()  # to resume from; of the fit that has ended
        self._counts = (0, 0)  # batches of a whole epoch, and finished ones of the resumed epoch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require_kept_loader(trainer.reload_dataloaders_every_n_epochs)
        if stage == "fit":
            self.__dict__.pop("controller", None)
        of, own = trainer.strategy, type(trainer.strategy).process_dataloader
        vars(of)["process_dataloader"] = lambda it: self._dealt(trainer, it) if trainer.training else own(of, it)

    def _dealt(self, trainer: Trainer, loader: Any) -> Epochs:
        if hasattr(self, "controller"):
            raise several_loaders("Lightning")
        self.controller, epochs = join(self.settings, loader, accumulate=trainer.accumulate_grad_batches)
        state, self._state, self._final = self._state, {}, {}
        if state:
            self.controller.load_state_dict(state)
            self._counts = (len(epochs), len(epochs) - batches_left(epochs)) if fixed(self.controller) else (0, 0)
        return epochs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for optimizer in trainer.optimizers:
            self.controller.wrap(trainer.strategy.model, optimizer, **{"scaler": scaler, **self.options})
        (whole, done), self._counts = self._counts, (0, 0)
        if whole and whole == trainer.num_training_batches:
            recount(trainer.fit_loop.epoch_loop.batch_progress, done)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.controller.step(loss=outputs)
        trainer.should_stop = trainer.should_stop or self.controller.stopping  # a budget is spent, or a stop requested

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._final = self.controller.state_dict(gather=True)  # for `trainer.save_checkpoint` after `fit`
        self.controller.close()

    def state_dict(self) -> dict[str, Any]:
        return self._final or (self.controller.state_dict(gather=True) if hasattr(self, "controller") else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
