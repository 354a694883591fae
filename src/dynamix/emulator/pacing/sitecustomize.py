"""Python imports this at its start, in every process of a rank: once torch is imported, training steps are paced.

Chains the environment's own `sitecustomize`. Costs nothing until torch is imported, and needs no installed dynamix.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(MetaPathFinder):
    """Finds torch as usual, and paces it once it has been imported."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_pace(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _start_pacing(module)

            loader.exec_module = execute_and_pace
        return spec


def _start_pacing(torch: ModuleType) -> None:
    # By path: the rank's interpreter may have no dynamix. `devices.batch_cost` finds the module by this name.
    spec = importlib.util.spec_from_file_location("dynamix_device_pacer", os.path.join(FOLDER, "pacer.py"))
    assert spec is not None
    assert spec.loader is not None
    pacer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = pacer
    spec.loader.exec_module(pacer)
    pacer.start(torch)


def _chain() -> None:
    """Imports the `sitecustomize` that this one hides."""
    ours = sys.modules.pop("sitecustomize")
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != FOLDER]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if __name__ == "sitecustomize":
    if "DYNAMIX_DEVICE" in os.environ:
        sys.meta_path.insert(0, AfterTorch())
    _chain()
