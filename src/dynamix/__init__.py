"""dynamix: adaptive per-worker batch sizes for synchronous data-parallel PyTorch training.

The public names are those in `__all__`; everything else may change between versions. They are imported on first use, so
that the command line and the emulator's small helper processes need not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamix.errors import (
        ConfigError,
        DynamixError,
        EmulationError,
        MemoryLimitError,
        PolicyFileError,
        ScenarioError,
        StateError,
        UsageError,
        WorkerLostError,
    )
    from dynamix.features import features
    from dynamix.policies import Policy, policy_names
    from dynamix.projection import project
    from dynamix.runtime.averaging import weighted_average
    from dynamix.runtime.controller import Controller
    from dynamix.runtime.gradients import weighted
    from dynamix.window import Bounds, Window

__version__ = "0.1.0"

__all__ = [
    "Bounds",
    "ConfigError",
    "Controller",
    "DynamixError",
    "EmulationError",
    "MemoryLimitError",
    "Policy",
    "PolicyFileError",
    "ScenarioError",
    "StateError",
    "UsageError",
    "Window",
    "WorkerLostError",
    "__version__",
    "features",
    "policy_names",
    "project",
    "weighted",
    "weighted_average",
]

_ROOMS = {
    "dynamix.runtime.controller": ("Controller",),
    "dynamix.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "dynamix.runtime.gradients": ("weighted",),
    "dynamix.runtime.averaging": ("weighted_average",),
    "dynamix.policies": ("Policy", "policy_names"),
    "dynamix.window": ("Bounds", "Window"),
    "dynamix.features": ("features",),
    "dynamix.projection": ("project",),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(room), name)
    raise AttributeError(f"module 'dynamix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
