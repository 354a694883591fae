"""What a saved state may hold: checks by which a part of it names the first value that is none of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from dynamix.errors import StateError, shown

FIX = "Load a state that controller.state_dict() returned, unchanged"
MOST = 2**53  # of a counter


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
    """A whole number of_type these bounds."""
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
