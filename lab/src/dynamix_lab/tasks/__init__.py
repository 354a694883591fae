"""Models and data sets that need no download."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from dynamix.errors import ConfigError
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy, as_is, held_out_loss, score

__all__ = [
    "Arrays",
    "Data",
    "Workload",
    "accuracy",
    "as_is",
    "held_out_loss",
    "make_workload",
    "score",
    "workload_names",
]

# name -> module with a function `workload`, and its arguments
_WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist1d": ("mnist1d", {}),
    "mnist1d-noisy-mlp": ("mnist1d_noisy", {}),
    "mnist1d-vgg": ("mnist1d_deep", {"net": "vgg", "adam": False}),
    "mnist1d-vgg-adam": ("mnist1d_deep", {"net": "vgg", "adam": True}),
    "mnist1d-resnet": ("mnist1d_deep", {"net": "resnet", "adam": False}),
    "mnist1d-resnet-adam": ("mnist1d_deep", {"net": "resnet", "adam": True}),
    "digits": ("digits", {"net": "conv", "adamw": False}),
    "digits-mlp": ("digits", {"net": "mlp", "adamw": False}),
    "digits-adamw": ("digits", {"net": "conv", "adamw": True}),
    "pysource": ("pysource", {"net": "transformer"}),
    "pysource-lstm": ("pysource", {"net": "lstm"}),
    "pysource-pieces": ("pysource_pieces", {"adamw": False}),
    "pysource-pieces-adamw": ("pysource_pieces", {"adamw": True}),
    "pysource-windows": ("pysource_windows", {"net": "transformer"}),
    "pysource-windows-lstm": ("pysource_windows", {"net": "lstm"}),
    "pulse": ("pulse", {"dims": 1}),
    "pulse-2d": ("pulse", {"dims": 2}),
    "teacher": ("teacher", {"kind": "regression"}),
    "teacher-classes": ("teacher", {"kind": "classes"}),
    "ratings": ("ratings", {"sparse": True}),
    "ratings-dense": ("ratings", {"sparse": False}),
}


def workload_names() -> list[str]:
    """Names that `make_workload` accepts."""
    return sorted(_WORKLOADS)


def make_workload(name: str, **options: Any) -> Workload:
    """A workload by name; `options` go to its module's `workload` function (noise, widths).

    >>> make_workload("mnist1d").min_batch
    8

    Raises `ConfigError` for unknown names and options.
    """
    if name not in _WORKLOADS:
        raise ConfigError("workload", name, ", ".join(workload_names()), "check the spelling")
    module, fixed = _WORKLOADS[name]
    factory = importlib.import_module(f"dynamix_lab.tasks.{module}").workload
    known = inspect.signature(factory).parameters
    free = [option for option in known if option not in fixed]
    for option in options:
        if option not in free:
            raise ConfigError(f"option of {name}", option, ", ".join(free) or "none", "check the spelling")
    made: Workload = factory(**fixed, **options)
    return made
