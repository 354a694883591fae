"""Families of simulated clusters that come from outside: `--families-from MODULE:FUNCTION`.

Whoever develops a policy sees the shipped families. A claim needs families that nobody saw in development, so they are
supplied when the claim is checked, and are no part of this repository.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.simulator import FAMILIES, Clusters

Sampler = Callable[[int, int, int], Clusters]  # (count, workers, seed) -> `count` clusters of `workers` workers
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")  # names are parts of file names
_OPTION = "--families-from"


def load_families(place: str) -> dict[str, Sampler]:
    """The families of "MODULE:FUNCTION": what the function's call without arguments gives, a mapping by name.

    Modules are looked for where Python does and in the working directory. Each sampler takes (count, workers, seed) and
    gives a `Clusters` of that shape, the same for the same arguments. The function's own errors are left as they are.

    Raises `ConfigError` where there is no such function, and for what is no mapping of usable names to samplers.
    """
    made = _function(place)()
    if not isinstance(made, Mapping) or not made:
        allowed = "a function that gives a mapping of names to samplers, one at least"
        raise ConfigError(_OPTION, f"{place} gives {made!r:.80}", allowed, "return {name: sampler, ...}")
    for name, sampler in made.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            allowed = "small letters, digits, dots, dashes and underlines, a letter or digit first"
            raise ConfigError(f"{_OPTION}: name of a family", name, allowed, "rename it")
        if name in FAMILIES:
            raise ConfigError(f"{_OPTION}: name of a family", name, "one that no shipped family has", "rename it")
        if not callable(sampler):
            allowed = "a callable of (count, workers, seed)"
            raise ConfigError(f"{_OPTION}: family {name}", f"{sampler!r:.80}", allowed, "give its sampler")
    return {name: _checked(name, sampler) for name, sampler in made.items()}


def source_sha256(place: str) -> str | None:
    """Hash of the file that the function of "MODULE:FUNCTION" is in; None where there is no such file."""
    module = sys.modules[_function(place).__module__]
    file = getattr(module, "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _function(place: str) -> Callable[[], Any]:
    module_name, colon, attribute = place.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(_OPTION, place, "MODULE:FUNCTION", "name a function that gives the families")
    before = list(sys.path)
    # An installed command does not look here, unlike `python -m`; last, so that nothing installed is hidden.
    sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        allowed = "a module that can be imported, also from the working directory"
        raise ConfigError(_OPTION, place, allowed, "check the spelling, or set PYTHONPATH") from error
    finally:
        sys.path[:] = before
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(_OPTION, place, f"a function of {module_name}", "check the name behind the colon")
    found: Callable[[], Any] = function
    return found


def _checked(name: str, sampler: Sampler) -> Sampler:
    """The sampler, whose answers must be clusters of the shape that was asked for, in numbers."""

    def sample(count: int, workers: int, seed: int) -> Clusters:
        clusters = sampler(count, workers, seed)
        asked = f"a Clusters of shape ({count}, {workers})"
        if not isinstance(clusters, Clusters):
            raise ConfigError(f"family {name}", f"{clusters!r:.80}", asked, "return dynamix_lab.simulator.Clusters")
        if clusters.shape != (count, workers):
            raise ConfigError(f"shape of family {name}", clusters.shape, asked, "follow count and workers")
        for field in dataclasses.fields(clusters):
            value = getattr(clusters, field.name)
            if isinstance(value, np.ndarray) and len(value) != count:
                allowed = f"{count}, one for each cluster"
                raise ConfigError(f"rows of {field.name} of family {name}", len(value), allowed, "follow count")
            if isinstance(value, np.ndarray) and np.isnan(value).any():
                raise ConfigError(f"{field.name} of family {name}", "NaN", "numbers", "leave no value out")
        return clusters

    return sample
