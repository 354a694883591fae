"""Fitted state: frozen dataclasses of arrays, saved as plain lists.

Every part of a model is one. Its `update` returns the next state and does not change the old one. `FIELDS` names the
arrays that are saved. Arrays begin with the leading dimensions (...) of the windows, use NaN for "not measured", and
are never written to after the update that made them.
"""

import dataclasses
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from dynamix.window import Floats

# The value before anything is known.
UNKNOWN: Floats = np.empty((0, 0))


class Fitted(Protocol):
    """A frozen dataclass whose arrays named in `FIELDS` are its state; its other fields are settings."""

    FIELDS: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]


_Part = TypeVar("_Part", bound=Fitted)


def nothing() -> Floats:
    """The default of a field before any window."""
    return UNKNOWN


def saved(part: Fitted) -> dict[str, Any]:
    """The arrays named in `FIELDS`, as plain lists."""
    return {name: getattr(part, name).tolist() for name in part.FIELDS}


def restored(part: _Part, state: dict[str, Any]) -> _Part:
    """`part` with the arrays that `saved` wrote."""
    return dataclasses.replace(part, **{name: array_of(state[name]) for name in part.FIELDS})


def array_of(values: Any) -> Floats:
    """A saved array; `UNKNOWN` if it was empty."""
    array = np.asarray(values, dtype=np.float64)
    return array if array.size else UNKNOWN


def merged(newer: np.ndarray, new: _Part, old: _Part) -> _Part:
    """`new` in the clusters (...) that are `newer`, else `old`; both have arrays of the same shapes."""

    def of(name: str) -> Floats:
        values = getattr(new, name)
        where = newer.reshape(newer.shape + (1,) * (values.ndim - newer.ndim))
        return np.asarray(np.where(where, values, getattr(old, name)))

    return dataclasses.replace(new, **{name: of(name) for name in new.FIELDS})


def laid_out(x: Floats) -> Floats:
    """The same array (..., W, G) with its longer axis innermost in memory, so that NumPy's inner loops are long.

    >>> laid_out(np.zeros((9, 2))).strides
    (8, 72)
    """
    if x.shape[-2] < x.shape[-1]:
        return np.ascontiguousarray(x)
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
