"""dynamix: adaptive per-worker batch sizes for synchronous data-parallel PyTorch training.

The public names are those in `__all__`; everything else may change between versions.
"""

from dynamix.controller import Controller
from dynamix.errors import (
    ConfigError,
    DynamixError,
    EmulationError,
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
