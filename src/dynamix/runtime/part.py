"""The parts of a job: each receives the job's events, and owns its state.

Also the checks with which a part names the first value of a state that it cannot have saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from dynamix.data.plan import Piece, Round
from dynamix.errors import StateError, shown

FIX = "Load a state that controller.state_dict() returned, unchanged"
MOST = 2**53  # largest value of a counter


class Observation(NamedTuple):
    """The loop's report of a batch that is done.

    loss, logits, target   as passed to `Controller.step`
    count                  samples that the mean loss is over, as passed; None: not passed
    applied                the weight that the loss carries; None if the hook had to apply it
    given                  losses carry their weights without the controller
    """

    loss: Any = None
    logits: Any = None
    target: Any = None
    count: int | None = None  # type: ignore[assignment]  # a tuple has a method of that name
    applied: Any = None
    given: bool = False


class Part:
    """A part of a job. It receives events if the job lists it, in the order of that list, and owns its state.

    Every event has a default that does nothing, and only parts that override it are called. A part looks for no other
    part: its constructor gets what it needs.

    name   of its state in a checkpoint; empty: it has none
    own    each rank has its own state, so a checkpoint holds one per rank; if this rank's is missing, None is loaded
    """

    name = ""
    own = False

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        """A pass of the current batch that records gradients begins; `kept`: the open window keeps its measurements."""

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        """`controller.step()`: the current batch is done."""

    def round_done(self, done: Round) -> None:
        """The last batch of a round is done."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, arrays and tensors by name."""
        return {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` unless `load_state_dict` could take `state`; changes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that was checked."""


def heard(parts: Iterable[Part], event: str) -> tuple[Callable[..., None], ...]:
    """The methods for `event` of those `parts` that override its default, in order.

    >>> class Counts(Part):
    ...     def round_done(self, done: Round) -> None: ...
    >>> len(heard([Part(), Counts()], "round_done")), len(heard([Part(), Counts()], "piece_done"))
    (1, 0)
    """
    default = getattr(Part, event)
    return tuple(getattr(part, event) for part in parts if getattr(type(part), event) is not default)


def wrong(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise `StateError` for a value that is not allowed."""
    said = shown(value)
    said = said if len(said) <= 80 else said[:77] + "..."
    raise StateError(f"the controller's state has {name}={said}, allowed is {allowed}. {FIX}")


def fields(name: str, value: Any, kinds: Mapping[str, type]) -> None:
    """Check for a dict with exactly these keys, and values of these types (`object`: any); integers are counters.

    >>> fields("progress", {"steps": 3, "shared": []}, {"steps": int, "shared": list})
    """
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        wrong(name, sorted(map(str, value)) if isinstance(value, dict) else value, f"a dict of {', '.join(kinds)}")
    for key, kind in kinds.items():
        found = value[key]
        if (type(found) is not kind and kind is not object) or (kind is int and not 0 <= found <= MOST):
            wrong(f"{name}.{key}", found, f"a whole number from 0 to {MOST}" if kind is int else f"a {kind.__name__}")


def of_type(name: str, value: Any, kind: type) -> Any:
    """The value, if it is of this type."""
    if type(value) is not kind:
        wrong(name, value, f"a {kind.__name__}")
    return value


def whole(name: str, value: Any, least: int, most: int) -> int:
    """The value, if it is a whole number within these bounds."""
    if type(value) is not int or not least <= value <= most:
        wrong(name, value, f"a whole number from {least} to {most}")
    return value


def wholes(name: str, value: Any, length: int | None = None) -> list[int]:
    """The value, if it is a list of counters, of this length if given."""
    if type(value) is not list or set(map(type, value)) - {int} or (length is not None and len(value) != length):
        wrong(name, value, f"a list of {'' if length is None else f'{length} '}whole numbers")
    if value and not 0 <= min(value) <= max(value) <= MOST:
        wrong(name, value, f"whole numbers from 0 to {MOST}")
    return value


def numbers(name: str, value: Any, length: int | None = None) -> None:
    """Check for a list or tuple of numbers, of this length if given; whole ones must be counters or their negatives."""
    if type(value) not in (list, tuple) or not {int, float}.issuperset(kinds := set(map(type, value))):
        wrong(name, value, "a list of numbers")
    if length is not None and len(value) != length:
        wrong(name, value, f"{length} numbers")
    if int in kinds and max([abs(number) for number in value if type(number) is int]) > MOST:
        wrong(name, value, f"whole numbers up to {MOST}")
