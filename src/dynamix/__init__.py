"""dynamix: adaptive per-worker batch sizes for synchronous data-parallel PyTorch training.

The public names are those in `__all__`; the submodules below are available as `dynamix.compression` and so on.
Everything else may change between versions. Both are imported on first use, so that the command line and the
emulator's small helper processes need not load torch.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from dynamix import removed

if TYPE_CHECKING:
    from dynamix.compression import CompressionState
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
    from dynamix.policies import Policy, make_policy, policy_names
    from dynamix.policies.guard import Guard
    from dynamix.projection import project
    from dynamix.runtime.controller import Controller
    from dynamix.runtime.limits import Limits
    from dynamix.runtime.settings import Settings
    from dynamix.runtime.sync.collectives import weighted_average
    from dynamix.runtime.sync.gradients import weighted
    from dynamix.runtime.sync.parameter_averaging import Averaging
    from dynamix.window import Bounds, Window

__version__ = "0.3.0"

__all__ = [
    "Averaging",
    "Bounds",
    "CompressionState",
    "ConfigError",
    "Controller",
    "DynamixError",
    "EmulationError",
    "Guard",
    "Limits",
    "MemoryLimitError",
    "Policy",
    "PolicyFileError",
    "ScenarioError",
    "Settings",
    "StateError",
    "UsageError",
    "Window",
    "WorkerLostError",
    "__version__",
    "features",
    "make_policy",
    "policy_names",
    "project",
    "weighted",
    "weighted_average",
]

_HOMES = {
    "dynamix.compression": ("CompressionState",),
    "dynamix.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "dynamix.policies": ("Policy", "make_policy", "policy_names"),
    "dynamix.policies.guard": ("Guard",),
    "dynamix.projection": ("project",),
    "dynamix.runtime.controller": ("Controller",),
    "dynamix.runtime.limits": ("Limits",),
    "dynamix.runtime.sync.collectives": ("weighted_average",),
    "dynamix.runtime.sync.gradients": ("weighted",),
    "dynamix.runtime.sync.parameter_averaging": ("Averaging",),
    "dynamix.runtime.settings": ("Settings",),
    "dynamix.window": ("Bounds", "Window"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
# `features` is a module that can be called like its function of the same name.
_SUBMODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


removed.answer_for_removed_modules()


def __getattr__(name: str) -> Any:
    if (fix := removed.NAMES.get(name) or removed.MODULES.get(f"dynamix.{name}")) is not None:
        raise ImportError(f"dynamix.{name}: {removed.message(fix)}", name=f"dynamix.{name}")
    if name in _SUBMODULES:
        return importlib.import_module(f"dynamix.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dynamix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
