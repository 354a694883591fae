"""Parts of a checkpoint whose structure varies, as one value: text, tensors, and what is neither.

A framework that flattens a state (`torch.distributed.checkpoint`) wants the same keys in every one, and
`torch.load(weights_only=True)` plain types. So a part is a tuple `(text, tensors, objects)`: JSON in which long lists
of numbers, arrays and tensors are names of `tensors`, and what JSON does not know is a name of `objects`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import StateError

Packed = tuple[str, tuple[Tensor, ...], tuple[Any, ...]]

DEEPEST = 40  # containers in each other
LONG = 16  # numbers from which a list is stored as a tensor
_MARK = "$"  # begins the only key of a dict that stands for something else


def pack(value: Any) -> Packed:
    """`value` as one part: a copy, which training on does not change.

    Raises `StateError` for containers that are nested too deeply.
    """
    text, tensors, objects = _written(value)
    return text, tuple(tensor.clone() for tensor in tensors), tuple(map(_copied, objects))


def _written(value: Any) -> Packed:
    tensors, objects = list[Tensor](), list[Any]()
    text = json.dumps(_plain(value, tensors, objects, DEEPEST), allow_nan=False, separators=(",", ":"))
    return text, tuple(tensors), tuple(objects)


def unpack(packed: Any, name: str = "part") -> Any:
    """The inverse of `pack`. Raises `StateError`, naming the part, for what `pack` did not write."""
    try:
        text, tensors, objects = packed
        if (type(packed), type(text), type(tensors), type(objects)) != (tuple, str, tuple, tuple):
            raise ValueError("it is not text, tensors and objects")
        if not all(type(tensor) is Tensor and tensor.layout == torch.strided for tensor in tensors):
            raise ValueError("a tensor is none")
        value = _value(json.loads(text), tensors, objects, DEEPEST)
        again = _written(value)
        forms = [[(tensor.dtype, tensor.shape) for tensor in of] for of in (tensors, again[1])]
        if again[0] != text or forms[0] != forms[1] or len(again[2]) != len(objects):
            raise ValueError("it is written in another form")
        return value
    except StateError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateError(f"the controller's state is damaged in {name}: {error}. {FIX}") from error


FIX = "Load a state that controller.state_dict() returned, unchanged"


def _plain(value: Any, tensors: list[Tensor], objects: list[Any], deep: int) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, np.integer):
        return int(value)
    if deep <= 0:
        raise StateError(f"a part of the state holds more than {DEEPEST} containers in each other")
    if isinstance(value, list):
        numbers = _numbers(value)
        if numbers is not None:
            tensors.append(torch.from_numpy(numbers))
            return {"$list": len(tensors) - 1}
        return [_plain(item, tensors, objects, deep - 1) for item in value]
    if type(value) is tuple:
        return {"$tuple": _plain(list(value), tensors, objects, deep - 1)}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: _plain(item, tensors, objects, deep - 1) for key, item in value.items()}
        pairs = [[_plain(part, tensors, objects, deep - 1) for part in pair] for pair in value.items()]
        return {"$dict": pairs}
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.isnative:
        tensors.append(torch.from_numpy(np.array(value)))
        return {"$array": len(tensors) - 1}
    objects.append(value)
    return {"$object": len(objects) - 1}


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # of any kind: what a hook of the user's holds, and pickle may take nevertheless
        return value


def _numbers(value: list[Any]) -> np.ndarray[Any, Any] | None:
    """A long list of floats, or of whole numbers, or a regular one of such lists, as an array; None for others."""
    flat: Any = value
    while isinstance(flat, list) and flat and type(flat[0]) is list:
        if set(map(type, flat)) != {list} or len(set(map(len, flat))) != 1:
            return None
        flat = list(itertools.chain.from_iterable(flat))
    kinds = set(map(type, flat))
    if len(flat) < LONG or kinds not in ({float}, {int}):
        return None
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype in (np.float64, np.int64) else None


def _value(plain: Any, tensors: Any, objects: Any, deep: int) -> Any:
    if deep <= 0:
        raise ValueError(f"more than {DEEPEST} containers in each other")
    if isinstance(plain, list):
        return [_value(item, tensors, objects, deep - 1) for item in plain]
    if not isinstance(plain, dict):
        if isinstance(plain, float) and not math.isfinite(plain):
            raise ValueError(f"a number is {plain}")
        return plain
    if not any(key.startswith(_MARK) for key in plain):
        return {key: _value(item, tensors, objects, deep - 1) for key, item in plain.items()}
    ((mark, of),) = plain.items()
    if mark == "$float":
        if of not in ("nan", "inf", "-inf"):
            raise ValueError(f"{of!r} is none of nan, inf, -inf")
        return float(of)
    if mark == "$tuple":
        return tuple(_value(of, tensors, objects, deep - 1))
    if mark == "$dict":
        return {_value(k, tensors, objects, deep - 1): _value(v, tensors, objects, deep - 1) for k, v in of}
    if isinstance(of, bool) or not isinstance(of, int) or of < 0:
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


def checksum(state: dict[str, Any]) -> str:
    """SHA-256, 64 hex digits, of everything in a state but its `checksum`; of objects only the type counts.

    >>> checksum({"a": 1, "checksum": "of something else"}) == checksum({"a": 1})
    True
    """
    digest = hashlib.sha256()
    _feed(digest, {key: value for key, value in state.items() if key != "checksum"}, DEEPEST)
    return digest.hexdigest()


def _feed(digest: Any, value: Any, deep: int) -> None:
    if deep <= 0:
        raise StateError(f"a state holds more than {DEEPEST} containers in each other. {FIX}")
    if isinstance(value, dict):
        digest.update(b"{%d" % len(value))
        for key in sorted(value, key=str):
            digest.update(f"{key!r}:".encode(errors="backslashreplace"))
            _feed(digest, value[key], deep - 1)
    elif isinstance(value, (list, tuple)):
        digest.update(b"[%d" % len(value) if isinstance(value, list) else b"(%d" % len(value))
        for item in value:
            _feed(digest, item, deep - 1)
    elif isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.numpy().data)
    elif isinstance(value, int) and value.bit_length() > 128:
        raise StateError(f"a state holds a whole number of {value.bit_length()} bits. {FIX}")
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"{type(value).__name__} {value!r};".encode(errors="backslashreplace"))
    else:
        digest.update(f"object {type(value).__qualname__};".encode())
