"""Names of dynamix wherever the revision under test keeps them."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

_PLACES = {
    "Window": ("dynamix.window",),
    "Bounds": ("dynamix.window",),
    "make_policy": ("dynamix.policies",),
    "Guard": ("dynamix.policies.guard", "dynamix.policies"),
    "LearningPolicy": ("dynamix.policies.learned.online", "dynamix.policies.online"),
    "train": ("dynamix_lab.training.dynamix_policy", "dynamix.learning.training"),
    "TrainingConfig": ("dynamix_lab.training.dynamix_policy", "dynamix.learning.training"),
    "LiveConfig": ("dynamix.policies.learned.deviations", "dynamix.policies.deviations"),
}


def in_rounds(window: Any, bounds: Any, pieces: int) -> tuple[Any, Any, int]:
    """Window and bounds of pieces as this revision counts, and by what its answer is to be divided.

    Since 0.2.0 sizes are samples per round of all pieces; before they were samples per piece.
    """
    if pieces == 1 or float(found("Window").of([1], micro_batches=2).global_batch) == 2.0:
        return window, bounds, 1
    names = ("low", "high", "total_low", "total_high", "quantum")
    wide = {name: pieces * getattr(bounds, name) for name in names}
    round_ = dataclasses.replace(window, batch_size=pieces * window.batch_size)
    return round_, dataclasses.replace(bounds, **wide), pieces


def found(name: str) -> Any:
    """A class or function of dynamix, wherever this revision keeps it."""
    for place in _PLACES[name]:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(_PLACES[name])}")
