"""The common part of all adapters: a controller from settings and the framework's facts, and a loader for its
batches."""

import math
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from dynamix.data.loader import Epochs, batch_size_of
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.controller import Controller
from dynamix.runtime.settings import Settings


def join(
    settings: Settings,
    loader: DataLoader[Any],
    *,
    accumulate: int | None = None,
    longest: bool = False,
    place: Callable[[Any], Any] | None = None,
    **options: Any,
) -> tuple[Controller, Epochs]:
    """A controller, and `loader` with the controller's batches. A collective call; needs the process group.

    accumulate   batches per optimizer step, if the framework knows it
    longest      if the global batch moves: `len()` is that of an epoch of the smallest batches; else there is no length
    place        applied to each batch, for example to move it to a device
    options      of `Controller.loader`
    """
    known: dict[str, Any] = {} if accumulate is None else {"accumulate": accumulate}
    if "micro_batch" not in settings.options and (size := batch_size_of(loader)) is not None:
        known["batch_size"] = size
    controller = settings.bind(**known)
    made = controller.loader(loader, **options)
    alike = "micro_batch" not in settings.options and settings.options.get("meet", "gradients") == "gradients"

    def steps() -> int | None:
        """Computed each time, because a loaded state brings its own global batch."""
        pieces = controller.accumulate
        if not alike:
            return None  # workers have different numbers of batches
        if fixed(controller):
            return made.cut.epoch_steps(controller.batch_sizes // pieces)
        return pieces * (math.ceil(made.cut.dataset_size / int(controller.bounds.total_low)) + 1) if longest else None

    return controller, Epochs(made, steps=steps, place=place)


def fixed(controller: Controller) -> bool:
    """Whether every round except an epoch's last has the same number of samples."""
    return bool(controller.bounds.total_low == controller.bounds.total_high)


def batches_left(epochs: Epochs) -> int:
    """Batches left in the epoch in which a state was loaded, before the loader is iterated."""
    cut = epochs.loader.cut
    if cut.finished:
        return 0
    return len(cut) if cut.progress else len(epochs)


def recount(counted: Any, done: int) -> None:
    """Set Lightning's `batch_progress` to `done` finished batches of the epoch.

    Its own number counts batches before the checkpoint, which may have had another size than the coming ones.
    """
    now, open_ones = counted.current, counted.total.processed - counted.total.completed
    now.ready = now.started = now.processed = done
    now.completed = done - open_ones  # Lightning completes them when it begins


def require_kept_loader(often: int) -> None:
    """Raise `ConfigError` if Lightning would rebuild the training loader, which `often` sets."""
    if often:
        allowed, fix = "0: one loader serves the whole job", "leave it out: the order follows the epoch by itself"
        raise ConfigError("reload_dataloaders_every_n_epochs", often, allowed, fix)


def several_loaders(framework: str) -> UsageError:
    """The error for a framework with more than one training loader."""
    why = f"{framework} has several training loaders, but dynamix deals and weights the batches of one only"
    return UsageError(f"{why}: give it one loader, of a data set whose samples have a part of each")


def require_steps_alike(settings: Settings, framework: str, why: str) -> None:
    """Raise `ConfigError` if ranks would have different numbers of batches, which `why` the framework cannot handle."""
    meet, most = settings.options.get("meet", "gradients"), settings.options.get("micro_batch")
    fix = "leave it out, or write the loop yourself, with Accelerate or Fabric (docs/frameworks.md)"
    if meet != "gradients":
        raise ConfigError("meet", meet, f"'gradients' under {framework}, which {why} on all ranks at once", fix)
    if most is not None:
        raise ConfigError("micro_batch", most, f"None under {framework}, which {why} on all ranks at once", fix)
