"""Clusters for training and evaluation, by name: training clusters, a simulator's family, or your own world."""

import importlib
import os
import runpy
import sys
from typing import Protocol

from dynamix.errors import ConfigError
from dynamix_lab.simulator import FAMILIES, Clusters, sample_clusters, sample_family
from dynamix_lab.training.curriculum import training_clusters

MIXED = "mixed"  # the training clusters of `dynamix`
SAMPLED = "sampled"  # the older `sample_clusters`, which match the goodput rule's assumptions


class World(Protocol):
    """A world of your own, named "MODULE:NAME" or "FILE.py:NAME": `WORLDS[NAME]` of that module."""

    @property
    def lr_rule(self) -> str:
        """How progress follows the noise scale: `ClusterEnv`'s argument."""

    def sample(self, count: int, workers: int, seed: int, *, hardness: float = 1.0) -> Clusters:
        """`count` clusters of `workers`; `hardness` in [0, 1] is how often they are disturbed."""


def sample_world(name: str, count: int, workers: int, seed: int, *, hardness: float = 1.0) -> Clusters:
    """`count` clusters of `workers` of a world by name. Raises `ConfigError`.

    >>> sample_world("pai-steady", 3, 4, seed=0).shape
    (3, 4)
    """
    if name == MIXED:
        return training_clusters(count, workers, seed, hardness=hardness)
    if name == SAMPLED:
        return sample_clusters(count, workers, seed)
    if name in FAMILIES:
        return sample_family(name, count, workers, seed)
    return _own(name).sample(count, workers, seed, hardness=hardness)


def check_world(name: str) -> None:
    """Raise `ConfigError` for an unknown world."""
    if name not in (*FAMILIES, MIXED, SAMPLED):
        _own(name)


def lr_rule_of(name: str) -> str:
    """How progress follows the noise scale in a world: `ClusterEnv`'s argument."""
    return _own(name).lr_rule if ":" in name else "adascale"


def _own(name: str) -> World:
    module, _, key = name.rpartition(":")
    if not module:
        allowed = f"{', '.join((*FAMILIES, MIXED, SAMPLED))}, MODULE:NAME, FILE.py:NAME"
        raise ConfigError("world", name, allowed, "check the spelling")
    before = list(sys.path)
    sys.path.append(os.getcwd())  # as for a policy of one's own: last, so that it hides nothing installed
    try:
        known = runpy.run_path(module) if module.endswith(".py") else vars(importlib.import_module(module))
    except (ImportError, OSError) as error:
        fix = f"{error}; modules are looked for where Python does and in the working directory"
        raise ConfigError("world", name, f"{module} that can be imported", fix) from error
    finally:
        sys.path[:] = before
    worlds: dict[str, World] = known.get("WORLDS", {})
    if key not in worlds:
        raise ConfigError("world", name, f"WORLDS of {module}: {', '.join(worlds) or 'none'}", "check the spelling")
    return worlds[key]
