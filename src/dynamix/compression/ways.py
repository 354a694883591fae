"""The ways of a bucket: what each sends, and how. Built-in ways and others are registered alike.

A distribution names a function in the entry point group `dynamix.compression`. It is called with a `Registry` when the
first `CompressionState` is made, and adds its ways:

    def register(ways: Registry) -> None:
        ways.add(Way("mine", traffic=my_traffic, exchange=my_exchange, candidate=True))

A way that cannot be imported is left out, with one warning. A name in use cannot be registered again.
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
AGGREGATED = "aggregator-"  # prefix of a way's name: an aggregator computes its sums
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
               something must go densely, it raises `checks.Doubt` on every rank, with the gradient unchanged
    missing    why it is not available; None: it is
    candidate  whether `auto` tries it
    instead    the way that a bucket takes after `Doubt("peel")`
    beyond     a way that always sends and computes less: once that one has lost, `auto` does not try this one
    """

    name: str
    traffic: Callable[[Spread], Sent] = _nowhere
    exchange: Callable[[Any, Tensor, Wire, int], None] = _nowhere
    missing: str | None = None
    candidate: bool = False
    instead: str | None = None
    beyond: str | None = None


class NetworkLink(Protocol):
    """A job's connection to an aggregator that computes sums. Ranks call it in step; `look` is a collective call."""

    candidates: tuple[str, ...]  # the ways that `auto` tries while it is connected

    @property
    def away(self) -> bool:
        """Whether the process group currently computes the sums."""

    def wire(self, reserve: Wire) -> Wire:
        """The wire for the next bucket."""

    def lost(self) -> None:
        """Record the loss of the aggregator, which all ranks know."""

    def look(self) -> bool:
        """Call once an exchange while it is away; returns whether all ranks have just joined again."""


MakeLink = Callable[[Any, dist.ProcessGroup, torch.device], NetworkLink]


class Registry:
    """Ways by name, in the order in which they were added.

    link   makes the connection for `CompressionState(aggregator=...)`; None: none is registered
    """

    def __init__(self) -> None:
        self._ways: dict[str, Way] = {}
        self.link: MakeLink | None = None

    def add(self, way: Way) -> None:
        """Add a way. Raises `ConfigError` if its name is taken, except by a missing way."""
        there = self._ways.get(way.name)
        if there is not None and there.missing is None:
            raise ConfigError("way", way.name, "a name that no other way has", "give it another name")
        self._ways[way.name] = way

    def of(self, name: str, argument: str = "way") -> Way:
        """The way `name`. Raises `ConfigError`, which names `argument`, for unknown or missing ways."""
        way = self._ways.get(name)
        if way is None or way.missing is not None:
            raise ConfigError(argument, name, ", ".join(("auto", *self.names)), str(way.missing) if way else "pick one")
        return way

    @property
    def names(self) -> tuple[str, ...]:
        """The available ways over a process group."""
        return tuple(
            name for name, way in self._ways.items() if way.missing is None and not name.startswith(AGGREGATED)
        )

    @property
    def candidates(self) -> tuple[str, ...]:
        """The ways that `auto` tries over a process group, besides a dense exchange."""
        return tuple(name for name in self.names if self._ways[name].candidate)

    def with_those_of(self, register: Register) -> Registry:
        """A copy with the ways that `register` adds; raises its errors."""
        found = Registry()
        found._ways, found.link = dict(self._ways), self.link
        register(found)
        return found


Register = Callable[[Registry], None]
_BUILT_IN: list[Register] = []


def include(register: Register) -> None:
    """Add ways of this package, before those of other distributions."""
    _BUILT_IN.append(register)


@functools.cache
def registry() -> Registry:
    """The ways of this process: built-in ones first, then those of other distributions, by their names."""
    found = Registry()
    for own in _BUILT_IN:
        own(found)
    for name, register in load_all(ENTRY_POINTS, tell=_log.warning).items():
        try:
            found = found.with_those_of(register)
        except Exception as error:  # whatever its error, gradients are exchanged without it
            _log.warning("dynamix: the compression methods of %s are left out: %s", name, why(error))
    return found
