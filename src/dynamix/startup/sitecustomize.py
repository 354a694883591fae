"""Python imports this at its start, in every process of a job in which functions are to be called with torch.

The environment names the functions to call once torch is imported (`called_environment`); this module knows none of
them. It also imports the environment's own `sitecustomize`. It costs nothing until torch is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
VARIABLE = "DYNAMIX_STARTUP"  # functions to call with torch, one a line, in order: MODULE:FUNCTION or FILE.py:FUNCTION


def called_environment(given: Mapping[str, str], place: str, *, first: bool = False) -> dict[str, str]:
    """`given`, changed so that every Python started in it calls `place` with torch, once torch is imported.

    place   MODULE:FUNCTION, or FILE.py:FUNCTION for an interpreter that may lack dynamix; the module of such a file
            is then `dynamix_startup_FILE`
    first   call it before the functions already in `given`, rather than after them

    PYTHONPATH and another `sitecustomize` still apply.

    >>> called_environment({"DYNAMIX_STARTUP": "a:start"}, "b:start", first=True)["DYNAMIX_STARTUP"].split()
    ['b:start', 'a:start']
    """
    others = [known for known in given.get(VARIABLE, "").split("\n") if known not in ("", place)]
    path = [FOLDER, *filter(None, [given.get("PYTHONPATH")])]
    places = [place, *others] if first else [*others, place]
    return {**given, VARIABLE: "\n".join(places), "PYTHONPATH": os.pathsep.join(path)}


class AfterImport(MetaPathFinder):
    """Finds a module as usual, and calls `then` with it after its import.

    Nothing is changed during an import: `import torch` itself imports `DistributedDataParallel`.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
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


def after_import(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call `then` with module `name` as soon as it is imported, or at once if it already is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, then))


def _call_all(torch: ModuleType) -> None:
    for place in filter(None, os.environ[VARIABLE].split("\n")):
        name, _, function = place.rpartition(":")
        module = _of_file(name) if name.endswith(".py") else _of_package(name)
        if module is not None:
            getattr(module, function)(torch)


def _of_file(path: str) -> ModuleType:
    name = f"dynamix_startup_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _of_package(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception as error:  # of any kind: this runs inside the script's `import torch`
        why = f"{sys.executable} cannot import {name} ({error})"
        print(f"dynamix: {why}, so this process runs without it: install dynamix-train there", file=sys.stderr)
        return None


def _chain() -> None:
    """Import the `sitecustomize` that this one hides."""
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
    if VARIABLE in os.environ:
        after_import("torch", _call_all)
    _chain()
