"""Adapters for frameworks that own part of the training loop; each module needs the extra of the same name.

They are available as `dynamix.integrations.lightning` and so on, and imported on first use (docs/frameworks.md).
"""

import importlib
from typing import Any

ADAPTERS = ("accelerate", "fabric", "lightning", "ray", "torchft", "transformers")


def __getattr__(name: str) -> Any:
    if name in ADAPTERS:
        return importlib.import_module(f"dynamix.integrations.{name}")
    raise AttributeError(f"module 'dynamix.integrations' has no attribute {name!r}")
