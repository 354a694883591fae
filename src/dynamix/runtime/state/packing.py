"""Packs parts of a checkpoint whose structure varies into one value: text, tensors, and other objects.

A framework that flattens a state (`torch.distributed.checkpoint`) requires the same keys in every state, and
`torch.load(weights_only=True)` plain types. So a part is a tuple `(text, tensors, objects)`. The text is JSON. Long
lists of numbers, arrays and tensors in it are references into `tensors`; what JSON lacks, into `objects`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable
from math import isfinite
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import StateError
from dynamix.runtime.part import FIX

Packed = tuple[str, tuple[Tensor, ...], tuple[Any, ...]]

DEEPEST = 40  # nested containers
LONG = 16  # length from which a list of numbers is stored as a tensor
_MARK = "$"  # begins the only key of a dict that is a reference
_marked, _form = methodcaller("startswith", _MARK), attrgetter("dtype", "shape")
_KNOWN = {type(None), bool, int, str}  # types that JSON represents, whatever the value


def pack(value: Any) -> Packed:
    """Pack `value` as one part: a copy, which later training does not change.

    Raises `StateError` if containers are nested too deeply.
    """
    text, tensors, objects = _written(value)
    return text, tuple(map(Tensor.clone, tensors)), tuple(map(_copied, objects))


def unpack(packed: Any, name: str = "part") -> Any:
    """The inverse of `pack`. Raises `StateError`, which names the part, for a value that `pack` did not write."""
    try:
        text, tensors, objects = packed
        if (type(packed), type(text), type(tensors), type(objects)) != (tuple, str, tuple, tuple):
            raise ValueError("it is not text, tensors and objects")
        if set(map(type, tensors)) - {Tensor} or set(map(attrgetter("layout"), tensors)) - {torch.strided}:
            raise ValueError("a tensor is none")
        value = json.loads(text, object_hook=functools.partial(_value, tensors, objects))
        again = _written(value)
        if again[0] != text or list(map(_form, tensors)) != list(map(_form, again[1])) or len(again[2]) != len(objects):
            raise ValueError("it is written in another form")
        return value
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateError(f"the controller's state is damaged in {name}: {error}. {FIX}") from error


def _written(value: Any) -> Packed:
    kept = _Kept([], [])
    text = json.dumps(_plain(value, kept, DEEPEST), allow_nan=False, separators=(",", ":"))
    return text, tuple(kept.tensors), tuple(kept.objects)


class _Kept(NamedTuple):
    """The values that the text refers to, not copied."""

    tensors: list[Tensor]
    objects: list[Any]


def _plain(value: Any, kept: _Kept, deep: int) -> Any:
    """The part of `value` that JSON can represent; the rest goes into `kept`."""
    if type(value) in _KNOWN or isinstance(value, str):
        return value
    if isinstance(value, (float, np.floating)):
        return float(value) if isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, np.integer):
        return int(value)
    if deep <= 0:
        raise StateError(f"a part of the state holds more than {DEEPEST} containers in each other")
    if isinstance(value, list):
        numbers = _numbers(value) if len(value) >= LONG or list in map(type, value) else None
        return _items(value, kept, deep) if numbers is None else _name("$list", kept.tensors, torch.from_numpy(numbers))
    if type(value) is tuple:
        return {"$tuple": _plain(list(value), kept, deep - 1)}
    if isinstance(value, dict):
        if set(map(type, value)) <= {str} and not any(map(_marked, value)):
            return dict(zip(value, _items(value.values(), kept, deep), strict=True))
        return {"$dict": [_items(pair, kept, deep) for pair in value.items()]}
    if isinstance(value, Tensor):
        return _name("$tensor", kept.tensors, value.detach())
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.isnative:
        return _name("$array", kept.tensors, torch.from_numpy(np.array(value)))
    return _name("$object", kept.objects, value)


def _items(values: Iterable[Any], kept: _Kept, deep: int) -> list[Any]:
    """All `values` of a container. JSON represents most of them directly."""
    return [
        value if type(value) in _KNOWN or (type(value) is float and isfinite(value)) else _plain(value, kept, deep - 1)
        for value in values
    ]


def _name(mark: str, among: list[Any], value: Any) -> dict[str, int]:
    among.append(value)
    return {mark: len(among) - 1}


def _value(tensors: tuple[Tensor, ...], objects: tuple[Any, ...], found: dict[str, Any]) -> Any:
    """A dict of the text, or the value that it refers to. Inner dicts are converted first."""
    if not any(map(_marked, found)):
        return found
    ((mark, of),) = found.items()
    if mark == "$float":
        return float(of)  # nan, inf, -inf
    if mark in ("$tuple", "$dict"):
        return tuple(of) if mark == "$tuple" else dict(of)
    if type(of) is not int or of < 0:
        raise ValueError(f"{mark} is {of!r}")
    if mark == "$list":
        return tensors[of].cpu().numpy().tolist()
    if mark == "$array":
        return np.array(tensors[of].cpu().numpy())
    if mark == "$tensor":
        return tensors[of].clone()
    if mark == "$object":
        return _copied(objects[of])
    raise ValueError(f"{mark} is unknown")


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # any error: a user's hook may hold objects that cannot be copied, yet can be pickled
        return value


def _numbers(value: list[Any]) -> np.ndarray[Any, Any] | None:
    """A long list of floats or of integers, or a regular list of such lists, as an array; None for any other list."""
    flat: Any = value
    while isinstance(flat, list) and flat and type(flat[0]) is list:
        if set(map(type, flat)) != {list} or len(set(map(len, flat))) != 1:
            return None
        flat = list(itertools.chain.from_iterable(flat))
    if len(flat) < LONG or set(map(type, flat)) not in ({float}, {int}):
        return None
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype in (np.float64, np.int64) else None


def alike(one: Any, other: Any) -> bool:
    """Whether two values would be written as the same text and tensors."""
    return checksum({"": _written(one)}) == checksum({"": _written(other)})


def checksum(state: dict[str, Any]) -> str:
    """SHA-256, 64 hex digits, of a whole state except its `checksum`; of objects only the type counts.

    >>> checksum({"a": 1, "checksum": "of something else"}) == checksum({"a": 1})
    True
    """
    digest = hashlib.sha256()
    whole = {key: value for key, value in state.items() if key != "checksum"}
    todo: list[tuple[str, Any, int]] = [("", whole, DEEPEST)]  # (text before, value, depth left); last first
    while todo:
        before, value, deep = todo.pop()
        if deep <= 0:
            raise StateError(f"a state holds more than {DEEPEST} containers in each other. {FIX}")
        if isinstance(value, dict):
            before += f"{{{len(value)}"
            names = sorted(value, key=str)[::-1]
            todo += zip(map("{!r}:".format, names), map(value.__getitem__, names), itertools.repeat(deep - 1))
        elif isinstance(value, (list, tuple)):
            before += f"{'[' if isinstance(value, list) else '('}{len(value)}"
            todo += zip(itertools.repeat(""), reversed(value), itertools.repeat(deep - 1))
        elif isinstance(value, Tensor):
            before += f"tensor {value.dtype} {tuple(value.shape)}"
        elif isinstance(value, int) and value.bit_length() > 128:
            raise StateError(f"a state holds a whole number of {value.bit_length()} bits. {FIX}")
        elif value is None or isinstance(value, (bool, int, float, str)):
            before += f"{type(value).__name__} {value!r};"
        else:
            before += f"object {type(value).__qualname__};"
        digest.update(before.encode(errors="backslashreplace"))
        if isinstance(value, Tensor) and value.numel():
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
