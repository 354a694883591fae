"""Adapters for frameworks that own a part of the training loop; each module needs the extra of its name.

They are reached as `dynamix.integrations.lightning` and so on, once asked for (docs/frameworks.md).
"""

import importlib
from typing import Any

ADAPTERS = ("accelerate", "fabric", "lightning", "ray", "torchft", "transformers")


def __getattr__(name: str) -> Any:
    if name in ADAPTERS:
        return importlib.import_module(f"dynamix.integrations.{name}")
    raise AttributeError(f"module 'dynamix.integrations' has no attribute {name!r}")
