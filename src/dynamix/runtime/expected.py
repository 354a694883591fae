"""What a saved state may hold: checks by which a part of it names the first value that is none of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from dynamix.errors import StateError, shown

FIX = "Load a state that controller.state_dict() returned, unchanged"
MOST = 2**53  # of a counter


def wrong(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the `StateError` for a value that is not allowed."""
    said = shown(value)
    said = said if len(said) <= 80 else said[:77] + "..."
    raise StateError(f"the controller's state has {name}={said}, allowed is {allowed}. {FIX}")


def keys(name: str, value: Any, allowed: Iterable[str]) -> None:
    """A dict of exactly these keys."""
    if not isinstance(value, dict) or value.keys() != set(allowed):
        wrong(name, sorted(map(str, value)) if isinstance(value, dict) else value, f"a dict of {', '.join(allowed)}")


def of_type(name: str, value: Any, kind: type) -> Any:
    """A value of that type."""
    if type(value) is not kind:
        wrong(name, value, f"a {kind.__name__}")
    return value


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """A whole number within these bounds."""
    if type(value) is not int or not least <= value <= most:
        wrong(name, value, f"a whole number from {least} to {most}")
    return value


def counters(name: str, state: Mapping[str, Any], which: Iterable[str]) -> None:
    """Counters under each of these keys."""
    for key in which:
        if type(value := state[key]) is not int or not 0 <= value <= MOST:
            wrong(f"{name}.{key}", value, f"a whole number from 0 to {MOST}")


def wholes(name: str, value: Any, length: int | None = None) -> list[int]:
    """A list of counters, of that length."""
    if type(value) is not list or set(map(type, value)) - {int} or (length is not None and len(value) != length):
        wrong(name, value, f"a list of {'' if length is None else length} whole numbers")
    if value and not 0 <= min(value) <= max(value) <= MOST:
        wrong(name, value, f"whole numbers from 0 to {MOST}")
    return value


def numbers(name: str, value: Any, length: int | None = None) -> None:
    """A list or tuple of numbers, of that length; whole ones are counters or their negatives."""
    if type(value) not in (list, tuple) or set(map(type, value)) - {int, float}:
        wrong(name, value, "a list of numbers")
    if length is not None and len(value) != length:
        wrong(name, value, f"{length} numbers")
    known = [number for number in value if type(number) is int]
    if known and not -MOST <= min(known) <= max(known) <= MOST:
        wrong(name, value, f"whole numbers up to {MOST}")
