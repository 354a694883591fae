"""The ways that a bucket can take: what each sends, and how. Each registers itself, built in or not.

A distribution names a function in the entry point group `dynamix.compression`. It is called with a `Registry` when the
first `CompressionState` is made, and adds its ways:

    def register(ways: Registry) -> None:
        ways.add(Way("mine", traffic=my_traffic, exchange=my_exchange, candidate=True))

A way that does not import is left out, and that is said once. A name that is there already is not given away.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.compression.spread import Sent, Spread
from dynamix.compression.wire import Wire
from dynamix.errors import ConfigError
from dynamix.plugins import load_all, why

ENTRY_POINTS = "dynamix.compression"
AGGREGATED = "aggregator-"  # before the name of a way: its sums are formed by an aggregator
ELSEWHERE = (
    "it is part of dynamix-homomorphic, which is not installed: pip install ./homomorphic  (in dynamix's source tree)"
)
_log = logging.getLogger(__name__)


def _nowhere(*_: Any) -> Any:
    raise AssertionError("a way that is missing is never asked")


@dataclass(frozen=True)
class Way:
    """One way of an exchange.

    traffic    what it sends, by the model of bytes and hops
    exchange   replaces a flat gradient by its mean: exchange(bucket, flat, wire, step), of a `BucketExchange`. If
               something has to go densely it raises `checks.Doubt`, on every rank alike, the gradient untouched
    missing    why it is not there; None: it is
    candidate  whether `auto` tries it
    instead    the way that a bucket takes if this one says "peel"
    beyond     a way that always sends and computes less: `auto` does not try this one once that one has lost
    """

    name: str
    traffic: Callable[[Spread], Sent] = _nowhere
    exchange: Callable[[Any, Tensor, Wire, int], None] = _nowhere
    missing: str | None = None
    candidate: bool = False
    instead: str | None = None
    beyond: str | None = None


class NetworkLink(Protocol):
    """A job's line to whoever forms sums in its place. Ranks call it in step; `look` is a collective call."""

    candidates: tuple[str, ...]  # what `auto` tries while it is there

    @property
    def away(self) -> bool:
        """Whether the process group forms the sums at present."""

    def wire(self, reserve: Wire) -> Wire:
        """The way that sums the next bucket."""

    def lost(self) -> None:
        """All ranks know that it is lost."""

    def look(self) -> bool:
        """Once an exchange while it is away: whether all ranks have just joined again."""


MakeLink = Callable[[Any, dist.ProcessGroup, torch.device], NetworkLink]


class Registry:
    """Ways by name, in the order in which they were added.

    link   makes the line that `CompressionState(aggregator=...)` asks for; None: nobody has brought one
    """

    def __init__(self) -> None:
        self._ways: dict[str, Way] = {}
        self.link: MakeLink | None = None

    def add(self, way: Way) -> None:
        """Raises `ConfigError` for a name that is taken. One that is missing so far is not."""
        there = self._ways.get(way.name)
        if there is not None and there.missing is None:
            raise ConfigError("way", way.name, "a name that no other way has", "give it another name")
        self._ways[way.name] = way

    def of(self, name: str, argument: str = "way") -> Way:
        """Raises `ConfigError`, which names `argument`, for ways that are unknown or missing."""
        way = self._ways.get(name)
        if way is None or way.missing is not None:
            raise ConfigError(argument, name, ", ".join(("auto", *self.names)), str(way.missing) if way else "pick one")
        return way

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there, over a process group."""
        return tuple(
            name for name, way in self._ways.items() if way.missing is None and not name.startswith(AGGREGATED)
        )

    @property
    def candidates(self) -> tuple[str, ...]:
        """The ways that `auto` tries over a process group, beside a dense exchange."""
        return tuple(name for name in self.names if self._ways[name].candidate)

    def with_those_of(self, register: Register) -> Registry:
        """All that is here and what `register` adds; raises what it raises."""
        found = Registry()
        found._ways, found.link = dict(self._ways), self.link
        register(found)
        return found


Register = Callable[[Registry], None]
_BUILT_IN: list[Register] = []


def include(register: Register) -> None:
    """Ways of this package: added before those of other distributions."""
    _BUILT_IN.append(register)


@functools.cache
def registry() -> Registry:
    """The ways of this process: built in first, then those of other distributions, by their names."""
    found = Registry()
    for own in _BUILT_IN:
        own(found)
    for name, register in load_all(ENTRY_POINTS, tell=_log.warning).items():
        try:
            found = found.with_those_of(register)
        except Exception as error:  # whatever is wrong with it, gradients are exchanged without it
            _log.warning("the compression ways of %s are left out: %s", name, why(error))
    return found
