"""Lightning Fabric: `setup` with one line changed, and `controller.step()` in the loop. Needs the extra `fabric`."""

from typing import Any

from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dynamix.data.loader import Epochs
from dynamix.integrations.joining import join
from dynamix.runtime.controller import Controller
from dynamix.runtime.settings import Settings

__all__ = ["Settings", "setup"]


def setup(
    fabric: Fabric,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    **options: Any,
) -> tuple[Controller, Any, Any, Epochs]:
    """`fabric.setup(model, optimizer)` and `fabric.setup_dataloaders(loader)`, with a controller in front.

        controller, model, optimizer, loader = setup(fabric, settings, net, optimizer, loader)
        for x, y in loader:
            ...
            controller.step(loss=loss)    # the last line of the loop's body

    Iterating `loader` again is the next epoch. If gradients accumulate, set that in the settings, and use
    `fabric.no_backward_sync`. `options` are those of `Controller.wrap`.
    """
    wrapped, prepared = fabric.setup(model, optimizer)
    controller, epochs = join(settings, loader, place=fabric.to_device)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    controller.wrap(wrapped, prepared, **{"scaler": scaler, **options})
    return controller, wrapped, prepared, epochs
