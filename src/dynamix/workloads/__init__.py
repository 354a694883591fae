"""Models and data sets that need no download."""

from __future__ import annotations

import importlib

from dynamix.errors import ConfigError
from dynamix.workloads.base import Arrays, Data, Workload, accuracy, as_is, score

__all__ = ["Arrays", "Data", "Workload", "accuracy", "as_is", "make_workload", "score", "workload_names"]

_REGISTER = {"mnist1d": "dynamix.workloads.mnist1d:workload"}


def workload_names() -> list[str]:
    """Names that `make_workload` accepts."""
    return sorted(_REGISTER)


def make_workload(name: str) -> Workload:
    """A workload by name.

    >>> make_workload("mnist1d").min_batch
    8
    """
    if name not in _REGISTER:
        raise ConfigError("workload", name, ", ".join(workload_names()), "check the spelling")
    module, _, attribute = _REGISTER[name].partition(":")
    made: Workload = getattr(importlib.import_module(module), attribute)()
    return made
