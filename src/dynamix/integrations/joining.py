"""The work of all adapters: a controller from settings and what the framework knows, and batches it takes as they
come."""

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
    """A controller, and `loader` with its batches. A collective call, once the process group exists.

    accumulate   batches per optimizer step, where the framework knows it
    longest      where the global batch moves: `len()` is that of an epoch of the smallest batches; else there is none
    place        done to each batch, such as moving it to a device
    options      of `Controller.loader`
    """
    known: dict[str, Any] = {} if accumulate is None else {"accumulate": accumulate}
    if "micro_batch" not in settings.options and (size := batch_size_of(loader)) is not None:
        known["batch_size"] = size
    controller = settings.bind(**known)
    made = controller.loader(loader, **options)
    alike = "micro_batch" not in settings.options and settings.options.get("meet", "gradients") == "gradients"

    def steps() -> int | None:
        """Asked anew each time: a state that is loaded brings the global batch that it was saved with."""
        pieces = controller.accumulate
        if not alike:
            return None  # workers have unlike numbers of batches
        if fixed(controller):
            return made.cut.epoch_steps(controller.batch_sizes // pieces)
        return pieces * (math.ceil(made.cut.dataset_size / int(controller.bounds.total_low)) + 1) if longest else None

    return controller, Epochs(made, steps=steps, place=place)


def fixed(controller: Controller) -> bool:
    """Whether every round but the last of an epoch has the same number of samples."""
    return bool(controller.bounds.total_low == controller.bounds.total_high)


def batches_left(epochs: Epochs) -> int:
    """Batches left of the epoch that a state was loaded in, before the loader is iterated."""
    cut = epochs.loader.cut
    if cut.finished:
        return 0
    return len(cut) if cut.progress else len(epochs)


def recount(counted: Any, done: int) -> None:
    """Make Lightning's `batch_progress` say that `done` batches of the epoch are done.

    Its own number is of batches before the checkpoint, which may have been of another size than those to come.
    """
    now, open_ones = counted.current, counted.total.processed - counted.total.completed
    now.ready = now.started = now.processed = done
    now.completed = done - open_ones  # Lightning closes them when it begins


def require_kept_loader(often: int) -> None:
    """Raise `ConfigError` where Lightning makes the training loader anew every so `often`."""
    if often:
        allowed, fix = "0: one loader serves the whole job", "leave it out: the order follows the epoch by itself"
        raise ConfigError("reload_dataloaders_every_n_epochs", often, allowed, fix)


def several_loaders(framework: str) -> UsageError:
    """The error to raise if a framework brings one more training loader."""
    why = f"{framework} has several training loaders, but dynamix deals and weights the batches of one only"
    return UsageError(f"{why}: give it one loader, of a data set whose samples have a part of each")


def require_steps_alike(settings: Settings, framework: str, why: str) -> None:
    """Raise `ConfigError` where ranks would have unlike numbers of batches, and `why` the framework cannot."""
    meet, most = settings.options.get("meet", "gradients"), settings.options.get("micro_batch")
    fix = "leave it out, or write the loop yourself, with Accelerate or Fabric (docs/frameworks.md)"
    if meet != "gradients":
        raise ConfigError("meet", meet, f"'gradients' under {framework}, which {why} on all ranks at once", fix)
    if most is not None:
        raise ConfigError("micro_batch", most, f"None under {framework}, which {why} on all ranks at once", fix)
