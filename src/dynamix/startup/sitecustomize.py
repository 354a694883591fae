"""Python imports this at its start, in every process of a job that is paced (`dynamix emulate`) or observed.

Chains the environment's own `sitecustomize`. Costs nothing until torch is imported. Pacing needs no installed dynamix.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
DEVICE_VARIABLE = "DYNAMIX_DEVICE"  # what a rank's device is: `dynamix.emulator.pacing.pacer`
OBSERVE_VARIABLE = "DYNAMIX_OBSERVE"  # the folder that a rank's steps are written to: `dynamix.observe`


class AfterImport(MetaPathFinder):
    """Finds a module as usual, and calls `then` with it once it has been imported.

    Nothing is changed while a module is imported: `import torch` itself imports `DistributedDataParallel`.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then
        self._searching = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_go_on(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.then(module)

            loader.exec_module = execute_and_go_on
        return spec


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with module `name` as soon as it is imported, at once if it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, then))


def _start_pacing(torch: ModuleType) -> None:
    # By path: the rank's interpreter may have no dynamix. `devices.batch_cost` finds the module by this name.
    path = os.path.join(os.path.dirname(FOLDER), "emulator", "pacing", "pacer.py")
    spec = importlib.util.spec_from_file_location("dynamix_device_pacer", path)
    assert spec is not None
    assert spec.loader is not None
    pacer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = pacer
    spec.loader.exec_module(pacer)
    pacer.start(torch)


def _start_observing(torch: ModuleType) -> None:
    try:
        hooks = importlib.import_module("dynamix.observe.hooks")
    except Exception as error:  # of any kind: this runs inside the script's `import torch`
        why = f"{sys.executable} cannot import dynamix ({error})"
        print(f"dynamix observe: {why}, so this process is not observed: install dynamix-train there", file=sys.stderr)
        return
    hooks.start(torch, os.environ[OBSERVE_VARIABLE])


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
    if OBSERVE_VARIABLE in os.environ:
        after_import("torch", _start_observing)
    if DEVICE_VARIABLE in os.environ:  # before the other one, as the first in `sys.meta_path`: who comes first paces
        after_import("torch", _start_pacing)
    _chain()
