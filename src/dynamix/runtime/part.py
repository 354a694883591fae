"""The parts of a job: they hear what happens to its rounds, and own their state.

And the checks by which a part's state names the first value that is none it could hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from dynamix.data.plan import Piece, Round
from dynamix.errors import StateError, shown

FIX = "Load a state that controller.state_dict() returned, unchanged"
MOST = 2**53  # of a counter


class Observation(NamedTuple):
    """The loop's report of a batch that is done.

    loss, logits, target   as `Controller.step` got them
    count                  samples that the mean loss is over, as the loop says; None: it does not
    applied                the weight that was in the loss, None if the hook had to apply it
    given                  losses carry their weights without the controller
    """

    loss: Any = None
    logits: Any = None
    target: Any = None
    count: int | None = None  # type: ignore[assignment]  # a tuple has a method of that name
    applied: Any = None
    given: bool = False


class Part:
    """A part of a job. It hears events in the order in which parts were added to the job, and owns its state.

    Every event has a default that does nothing, and only parts that override one are called. A part knows no other
    part: what it needs it is given in its constructor.

    name   of its state in a checkpoint; empty: it has none
    own    every rank has another state, so that a checkpoint holds one for each; None is loaded if it lacks this rank's
    """

    name = ""
    own = False

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        """A pass that records gradients begins of the batch in hand; `kept`: the open window keeps what is measured."""

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        """`controller.step()`: the batch in hand is done."""

    def round_done(self, done: Round) -> None:
        """The last batch of a round is done."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, arrays and tensors by name."""
        return {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` unless `load_state_dict` could take `state`; changes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that was checked."""


def heard(parts: Iterable[Part], event: str) -> tuple[Callable[..., None], ...]:
    """The methods of `parts` for `event`, in order, of those that override its default.

    >>> class Counts(Part):
    ...     def round_done(self, done: Round) -> None: ...
    >>> len(heard([Part(), Counts()], "round_done")), len(heard([Part(), Counts()], "piece_done"))
    (1, 0)
    """
    default = getattr(Part, event)
    return tuple(getattr(part, event) for part in parts if getattr(type(part), event) is not default)


def wrong(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the `StateError` for a value that is not allowed."""
    said = shown(value)
    said = said if len(said) <= 80 else said[:77] + "..."
    raise StateError(f"the controller's state has {name}={said}, allowed is {allowed}. {FIX}")


def fields(name: str, value: Any, kinds: Mapping[str, type]) -> None:
    """A dict of exactly these keys, each value being of its type (`object`: of any); whole numbers are counters.

    >>> fields("progress", {"steps": 3, "shared": []}, {"steps": int, "shared": list})
    """
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        wrong(name, sorted(map(str, value)) if isinstance(value, dict) else value, f"a dict of {', '.join(kinds)}")
    for key, kind in kinds.items():
        found = value[key]
        if (type(found) is not kind and kind is not object) or (kind is int and not 0 <= found <= MOST):
            wrong(f"{name}.{key}", found, f"a whole number from 0 to {MOST}" if kind is int else f"a {kind.__name__}")


def of_type(name: str, value: Any, kind: type) -> Any:
    """A value of that type."""
    if type(value) is not kind:
        wrong(name, value, f"a {kind.__name__}")
    return value


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number within these bounds."""
    if type(value) is not int or not least <= value <= most:
        wrong(name, value, f"a whole number from {least} to {most}")
    return value


def wholes(name: str, value: Any, length: int | None = None) -> list[int]:
    """A list of counters, of that length."""
    if type(value) is not list or set(map(type, value)) - {int} or (length is not None and len(value) != length):
        wrong(name, value, f"a list of {'' if length is None else f'{length} '}whole numbers")
    if value and not 0 <= min(value) <= max(value) <= MOST:
        wrong(name, value, f"whole numbers from 0 to {MOST}")
    return value


def numbers(name: str, value: Any, length: int | None = None) -> None:
    """A list or tuple of numbers, of that length; whole ones are counters or their negatives."""
    if type(value) not in (list, tuple) or not {int, float}.issuperset(kinds := set(map(type, value))):
        wrong(name, value, "a list of numbers")
    if length is not None and len(value) != length:
        wrong(name, value, f"{length} numbers")
    if int in kinds and max([abs(number) for number in value if type(number) is int]) > MOST:
        wrong(name, value, f"whole numbers up to {MOST}")
