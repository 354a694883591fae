"""Features of earlier versions that no longer exist: using one raises an error that says what to write instead."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ParamSpec, TypeVar

from dynamix.errors import ConfigError, spelling

P = ParamSpec("P")
R = TypeVar("R")

NO_LEARNING = "no learn=: a policy decides as its file has it; `dynamix policy train` makes another file"


def _moved(module: str) -> str:
    folder = "lab" if module.startswith("dynamix_lab") else "homomorphic"
    return f"import {module} (pip install ./{folder}, in dynamix's source tree)"


# A removed module, with its submodules: what to write instead. Kept in alphabetical order.
MODULES: dict[str, str] = {
    "dynamix.compression.aggregator": _moved("dynamix_homomorphic.aggregator"),
    "dynamix.compression.bounded": "nothing in place of BoundedState, or use LossyState of dynamix_homomorphic",
    "dynamix.compression.compaction": _moved("dynamix_homomorphic.compaction"),
    "dynamix.compression.fixed_point": _moved("dynamix_homomorphic.fixed_point"),
    "dynamix.compression.lhc": _moved("dynamix_homomorphic.lhc"),
    "dynamix.compression.lossy": _moved("dynamix_homomorphic.lossy"),
    "dynamix.compression.peeling": _moved("dynamix_homomorphic.peeling"),
    "dynamix.compression.sketch": _moved("dynamix_homomorphic.sketch"),
    "dynamix.emulator": _moved("dynamix_lab.emulator"),
    "dynamix.policies.cannikin": _moved("dynamix_lab.baselines.cannikin"),
    "dynamix.policies.learned.additive": _moved("dynamix_lab.papers.additive"),
    "dynamix.policies.noise_scale": _moved("dynamix_lab.baselines.noise_scale"),
    "dynamix.policies.pollux": _moved("dynamix_lab.baselines.pollux"),
    "dynamix.probes.bpf": _moved("dynamix_lab.probes.bpf"),
    "dynamix.runtime.replicas": "dynamix.integrations.replicas, in this distribution",
    "dynamix.simulator": _moved("dynamix_lab.simulator"),
    "dynamix.telemetry.exporter": "what examples/exporter.py does",
    "dynamix.training": _moved("dynamix_lab.training"),
    "dynamix.virtual": _moved("dynamix_lab.virtual"),
}
# A removed name of `dynamix`: what to write instead.
NAMES: dict[str, str] = {
    "LiveConfig": NO_LEARNING,
}


def message(fix: str) -> str:
    """The sentence that every error of this module ends with.

    >>> message("import dynamix_lab.emulator")
    'removed in 0.3: write import dynamix_lab.emulator'
    """
    return f"removed in 0.3: write {fix}"


def removed_arguments(**fixes: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function reject these keyword arguments, each with what to write instead (ConfigError).

    An argument that it never had raises Python's TypeError, with the name of the argument that was probably meant.

    >>> @removed_arguments(learn="nothing: the policy's file is what decides")
    ... def make(policy: str) -> str:
    ...     return policy
    >>> make("static"), make("static", learn=True)
    Traceback (most recent call last):
    ...
    dynamix.errors.ConfigError: learn=True is not possible: allowed is not to pass it; removed in 0.3: write nothing: \
the policy's file is what decides
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in fixes.keys() & kwargs.keys():
                raise ConfigError(name, kwargs[name], "not to pass it", message(fixes[name]))
            for name in () if any_name else kwargs.keys() - known.keys():
                of = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{of}() got an unexpected keyword argument {name!r}: {spelling(name, known)}")
            return function(*args, **kwargs)

        return call

    return decorate


def refuses_averaging(init: Callable[..., None]) -> Callable[..., None]:
    """Make `Averaging` reject the options of 0.2: by name, and any argument in the third place or later."""
    refusing = removed_arguments(
        early="Averaging() without early; shares by speed (policy='lb_bsp' or 'goodput') let workers arrive together",
        overlap="Averaging(wire='bfloat16'), or Averaging(optimizer_state='kept'): both send less over a slow link",
        sparse="Averaging() without sparse; with meet='gradients' and a hook of dynamix.compression sparse rows travel "
        "alone",
        steps="Averaging() without steps: a worker's move counts by its samples",
    )(init)

    @functools.wraps(init)
    def call(self: object, *args: object, **kwargs: object) -> None:
        if (more := args[2:]) != ():
            fix = message("Averaging(optimizer_state, outer, wire=...)") + "; steps, early, overlap and sparse are gone"
            raise ConfigError("Averaging", more, "two values without a name: optimizer_state and outer", fix)
        refusing(self, *args, **kwargs)

    return call


class RemovedModules:
    """An import finder that comes after all others: it raises ImportError for modules that were moved or removed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MODULES:
            raise ImportError(f"{name}: {message(MODULES[name])}", name=name)
        return None


def answer_for_removed_modules() -> None:
    """Install `RemovedModules` as the last finder, once in a process."""
    if not any(isinstance(finder, RemovedModules) for finder in sys.meta_path):
        sys.meta_path.append(RemovedModules())
