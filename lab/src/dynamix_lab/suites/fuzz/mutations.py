"""How an input is damaged: values in a structure, and bytes or words of a text."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "nan", "\x00", "\ud800", "é" * 50, [], {}, [[]], [0], [1.5], {"x": 1}, {"$list": 0}, (), (1, 2)),
)
WORDS = ("null", "true", "-1", "1e999", "NaN", *'[]{}",:', "*a", "&a", "\n", "- ", "\t", "0" * 40)


def deep(rng: random.Random) -> Any:
    """Nested containers."""
    value: Any = 1
    for _ in range(rng.choice((3, 50, 2000))):
        value = [value] if rng.random() < 0.8 else {"x": value}
    return value


def odd(rng: random.Random) -> Any:
    return deep(rng) if rng.random() < 0.02 else rng.choice(ODD)


def value(given: Any, rng: random.Random) -> Any:
    """`given` with one value changed, removed, doubled or moved. Does not change `given` itself."""
    if isinstance(given, dict) and given and rng.random() < 0.95:
        key = rng.choice(list(given))
        return _of_dict(given, key, rng)
    if isinstance(given, (list, tuple)) and given and rng.random() < 0.95:
        changed: Any = _of_list(list(given), rng)
        return tuple(changed) if isinstance(given, tuple) else changed
    if isinstance(given, Tensor) and rng.random() < 0.9:
        return tensor(given, rng)
    if isinstance(given, str) and rng.random() < 0.7:
        return text(given, rng)
    if isinstance(given, (int, float)) and not isinstance(given, bool) and rng.random() < 0.5:
        near = rng.choice((1, -1, 7, -7, 2, 1000))
        return rng.choice((given + near, given - near, -given, given * near, float(min(max(given, -1e300), 1e300))))
    return odd(rng)


def _of_dict(given: dict[Any, Any], key: Any, rng: random.Random) -> dict[Any, Any]:
    how = rng.random()
    if how < 0.85:
        return {**given, key: value(given[key], rng)}
    if how < 0.92:
        return {k: v for k, v in given.items() if k != key}
    if how < 0.96:
        return {**given, rng.choice(("x", "schema", 1, None)): odd(rng)}
    return {**given, key: given[rng.choice(list(given))]}


def _of_list(items: list[Any], rng: random.Random) -> list[Any]:
    at, how = rng.randrange(len(items)), rng.random()
    if how < 0.75:
        items[at] = value(items[at], rng)
    elif how < 0.83:
        del items[at]
    elif how < 0.91:
        items.insert(at, items[at])
    else:
        other = rng.randrange(len(items))
        items[at], items[other] = items[other], items[at]
    return items


def tensor(given: Tensor, rng: random.Random) -> Tensor:
    """A tensor with other values, another shape, or another type."""
    flat = given.detach().clone().reshape(-1)
    how = rng.random()
    if how < 0.6 and flat.numel():
        extreme = (float("nan"), float("inf"), -1.0, 0.0, 1e30) if flat.is_floating_point() else (0, 1, -1, 127)
        few = rng.choice(extreme)
        flat[rng.randrange(flat.numel())] = few if flat.dtype != torch.uint8 else abs(int(few))
        return flat.reshape(given.shape)
    if how < 0.75:
        return flat[: rng.randrange(flat.numel() + 1)]
    if how < 0.9:
        return given.to(rng.choice((torch.float32, torch.int64, torch.bool, torch.complex64, torch.uint8)))
    return torch.zeros(rng.choice(((), (0,), (3,), (2, 2), (1, 0))))


def text(given: str, rng: random.Random) -> str:
    """A text with a few characters, words or pieces changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        a, b = sorted((rng.randrange(len(given) + 1), rng.randrange(len(given) + 1)))
        how = rng.random()
        if how < 0.35:
            given = given[:a] + rng.choice(WORDS) + given[a + 1 :]
        elif how < 0.6:
            given = given[:a] + chr(rng.choice((rng.randrange(128), rng.randrange(0xD7FF)))) + given[a + 1 :]
        elif how < 0.75:
            given = given[:a] + given[min(b, a + 20) :]
        elif how < 0.9:
            given = given[:b] + given[a : min(b, a + 200)] + given[b:]
        else:
            given = given[:a]
    return given


def raw(given: bytes, rng: random.Random) -> bytes:
    """Bytes with a few of them changed."""
    data = bytearray(given)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not data:
            break
        at, how = rng.randrange(len(data)), rng.random()
        if how < 0.6:
            data[at] ^= 1 << rng.randrange(8)
        elif how < 0.8:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    return bytes(data)
