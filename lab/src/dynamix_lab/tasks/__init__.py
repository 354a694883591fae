"""Models and data sets that need no download, and loaders for data that are here already."""

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

# name -> module with a function `workload`, and what that is called with
_BUNDLED: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist1d": ("mnist1d", {}),
    **{f"mnist1d-{net}": ("mnist1d_deep", {"net": net}) for net in ("vgg11", "vgg16", "vgg19", "resnet34", "resnet50")},
    "mnist1d-noisy": ("mnist1d_noisy", {"net": "conv"}),
    "mnist1d-noisy-mlp": ("mnist1d_noisy", {"net": "mlp"}),
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
_REGISTER: dict[str, tuple[str, dict[str, Any]]] = {
    **_BUNDLED,
    **{
        f"{data_set}-{net}": ("cifar", {"data_set": data_set, "net": net})
        for data_set in ("cifar10", "cifar100")
        for net in ("vgg16", "resnet34")
    },
    "huggingface": ("huggingface", {}),
}


def workload_names(*, bundled: bool = False) -> list[str]:
    """Names that `make_workload` accepts; `bundled`: only those that need no files of yours."""
    return sorted(_BUNDLED if bundled else _REGISTER)


def make_workload(name: str, **options: Any) -> Workload:
    """A workload by name; `options` go to its module's `workload` function (widths, folders, columns).

    >>> make_workload("mnist1d").min_batch
    8
    >>> make_workload("mnist1d-vgg11", width=8).description
    'mnist1d, vgg11 in one dimension, 8 channels wide at first, group norm'

    Raises `ConfigError` for unknown names and options, and for options that are missing.
    """
    if name not in _REGISTER:
        raise ConfigError("workload", name, ", ".join(workload_names()), "check the spelling")
    module, fixed = _REGISTER[name]
    factory = importlib.import_module(f"dynamix_lab.tasks.{module}").workload
    known = inspect.signature(factory).parameters
    free = [option for option in known if option not in fixed]
    for option in options:
        if option not in free:
            raise ConfigError(f"option of {name}", option, ", ".join(free) or "none", "check the spelling")
    for option in free:
        if known[option].default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f"option of {name}", f"{option} missing", ", ".join(free), f"pass {option}=")
    made: Workload = factory(**fixed, **options)
    return made
