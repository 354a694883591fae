"""The exceptions dynamix raises. Catch `DynamixError` to catch them all.

>>> try:
...     raise ConfigError("batch_size", 0, "1 to 1048576", "pass the per-worker batch size you train with today")
... except DynamixError as error:
...     print(error)
batch_size=0 is not possible: allowed is 1 to 1048576; pass the per-worker batch size you train with today
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 400
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 64


def shown(value: object) -> str:
    """`value` for a message: not too long, and not nested too deeply for Python's repr.

    >>> shown([1, "a"]), len(shown("x" * 10_000)) < 500
    ("[1, 'a']", True)
    """
    return _Short().repr(value)


class DynamixError(Exception):
    """Base of every error that dynamix raises on purpose."""


class ConfigError(DynamixError, ValueError):
    """A value given by the user is not possible. Names the value, the allowed range and the fix."""

    def __init__(self, name: str, value: object, allowed: str, fix: str) -> None:
        self.name, self.value, self.allowed, self.fix = name, value, allowed, fix
        super().__init__(f"{name}={shown(value)} is not possible: allowed is {allowed}; {fix}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.name, self.value, self.allowed, self.fix)


class PolicyFileError(ConfigError):
    """A policy file is missing, corrupted, or of another schema."""


class ScenarioError(ConfigError):
    """An emulation scenario asks for something unknown or impossible."""


class UsageError(DynamixError, RuntimeError):
    """The calls of a training loop contradict each other (order, missing `weight`, a second hook)."""


class StateError(DynamixError, RuntimeError):
    """A checkpoint does not fit this job."""


class WorkerLostError(DynamixError, RuntimeError):
    """A rank died, or did not answer within the process group's timeout.

    ranks   the lost ranks, if known
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        super().__init__(message)

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class EmulationError(DynamixError, RuntimeError):
    """This machine lacks, or refused, what an emulation needs."""


class MemoryLimitError(DynamixError, RuntimeError):
    """A batch does not fit a worker's memory. Names the rank and what to set."""


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The name in `known` that `name` probably means; None if there is no close one.

    >>> nearest("lbbsp", ["dbs", "lb_bsp"]), nearest("LB-BSP", ["dbs", "lb_bsp"]), nearest("mine", ["dbs", "lb_bsp"])
    ('lb_bsp', 'lb_bsp', None)
    """
    return next(iter(difflib.get_close_matches(str(name).lower().replace("-", "_"), list(known), 1)), None)


def spelling(name: object, known: Iterable[str], otherwise: str = "check the spelling") -> str:
    """The advice for a `name` that is not in `known`.

    >>> spelling("adaptve", ["adaptive", "fixed"]), spelling(3, ["adaptive", "fixed"])
    ("did you mean 'adaptive'?", 'check the spelling')
    """
    return otherwise if (meant := nearest(name, known)) is None else f"did you mean {meant!r}?"
