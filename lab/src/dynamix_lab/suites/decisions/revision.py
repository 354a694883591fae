"""Names of dynamix wherever the revision under test keeps them."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Window": ("dynamix.window",),
    "Bounds": ("dynamix.window",),
    "make_policy": ("dynamix.policies",),
    "Guard": ("dynamix.policies.guard", "dynamix.policies"),
    "LearningPolicy": ("dynamix.policies.learned.online", "dynamix.policies.online"),
    "train": ("dynamix.training.dynamix_policy", "dynamix.learning.training"),
    "TrainingConfig": ("dynamix.training.dynamix_policy", "dynamix.learning.training"),
    "LiveConfig": ("dynamix.policies.learned.deviations", "dynamix.policies.deviations"),
}


def found(name: str) -> Any:
    """A class or function of dynamix, wherever this revision keeps it."""
    for place in _PLACES[name]:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(_PLACES[name])}")
