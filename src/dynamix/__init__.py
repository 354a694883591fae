"""dynamix: adaptive per-worker batch sizes for synchronous data-parallel PyTorch training.

The public names are those in `__all__`; everything else may change between versions. They are imported on first use, so
that the command line and the emulator's small helper processes need not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamix.controller import Controller
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
    from dynamix.gradients import weighted, weighted_average
    from dynamix.policies import Policy, policy_names
    from dynamix.window import Bounds, Window, features, project

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
    "dynamix.controller": ("Controller",),
    "dynamix.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "dynamix.gradients": ("weighted", "weighted_average"),
    "dynamix.policies": ("Policy", "policy_names"),
    "dynamix.window": ("Bounds", "Window", "features", "project"),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(room), name)
    raise AttributeError(f"module 'dynamix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
