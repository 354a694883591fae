"""Accelerate: `prepare` with one line changed, and `controller.step()` in the loop. Needs the extra `accelerate`."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dynamix.integrations.joining import join
from dynamix.runtime.settings import Settings

__all__ = ["Settings", "prepare"]


def prepare(
    accelerator: Accelerator,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *others: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, loader, *others)`, with a controller in front of the result.

        controller, model, optimizer, loader = prepare(accelerator, settings, model, optimizer, loader)
        for x, y in loader:
            ...                           # with accelerator.accumulate(model), where gradients accumulate
            controller.step(loss=loss)    # the last line of the loop's body

    Iterating `loader` again is the next epoch. Batches per optimizer step are the accelerator's
    `gradient_accumulation_steps`. `options` are those of `Controller.wrap`.
    """
    steps = accelerator.gradient_accumulation_steps
    apart = "micro_batch" in settings.options or settings.options.get("meet", "gradients") != "gradients"
    controller, epochs = join(
        settings,
        loader,
        accumulate=None if apart and steps == 1 else steps,
        place=lambda batch: send_to_device(batch, accelerator.device),
    )
    model, optimizer, *rest = accelerator.prepare(model, optimizer, *others)
    controller.wrap(model, optimizer, scaler=accelerator.scaler, **options)
    return controller, model, optimizer, epochs, *rest
