"""What earlier versions had and this one does not: whoever still writes it is told what to write now."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ParamSpec, TypeVar

from dynamix.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_HOMOMORPHIC = "after pip install ./homomorphic  (in dynamix's source tree)"
# A module that is gone, and its submodules: what to write in its place. Kept in alphabetical order.
MODULES: dict[str, str] = {
    "dynamix.compression.aggregator": f"import dynamix_homomorphic.aggregator, {_HOMOMORPHIC}",
    "dynamix.compression.bounded": "nothing in place of BoundedState, or use LossyState of dynamix_homomorphic",
    "dynamix.compression.compaction": f"import dynamix_homomorphic.compaction, {_HOMOMORPHIC}",
    "dynamix.compression.fixed_point": f"import dynamix_homomorphic.fixed_point, {_HOMOMORPHIC}",
    "dynamix.compression.lhc": f"import dynamix_homomorphic.lhc, {_HOMOMORPHIC}",
    "dynamix.compression.lossy": f"import dynamix_homomorphic.lossy, {_HOMOMORPHIC}",
    "dynamix.compression.peeling": f"import dynamix_homomorphic.peeling, {_HOMOMORPHIC}",
    "dynamix.compression.sketch": f"import dynamix_homomorphic.sketch, {_HOMOMORPHIC}",
    "dynamix.compression.triton_kernels": "nothing: on CUDA torch's own kernels run",
}
# A name of `dynamix` that is gone: what to write in its place.
NAMES: dict[str, str] = {}


def message(fix: str) -> str:
    """The sentence that every error of this module ends with.

    >>> message("import dynamix_lab.emulator")
    'removed in 0.3: write import dynamix_lab.emulator'
    """
    return f"removed in 0.3: write {fix}"


def removed_arguments(**fixes: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function refuse the keyword arguments named here, each with what to write now (ConfigError).

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
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in fixes.keys() & kwargs.keys():
                raise ConfigError(name, kwargs[name], "not to pass it", message(fixes[name]))
            return function(*args, **kwargs)

        return call

    return decorate


class RemovedModules:
    """A finder that comes after all others: it answers for modules that moved or went, by an ImportError."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name in MODULES:
            raise ImportError(f"{name}: {message(MODULES[name])}", name=name)
        return None


def answer_for_removed_modules() -> None:
    """Ask `RemovedModules` last, once in a process."""
    if not any(isinstance(finder, RemovedModules) for finder in sys.meta_path):
        sys.meta_path.append(RemovedModules())
