"""Reads pickles of plain data and byte arrays, and nothing else.

A pickle is a program: an ordinary unpickler calls whatever its file names, and hands it any state. Here a file can name
only the four things that a byte array needs, and gets stand-ins of ours for them: they check what they are given,
cannot be changed, and make the array only when it is complete. Everything else, and every malformed file, is a
`ConfigError`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError


def load_plain(path: Path, *, fix: str) -> Any:
    """What was pickled by Python 2 or 3: a dict, list, tuple, number, bytes or string; uint8 arrays alone or in a dict.

    fix   what the user should do about any other file, for the error

    Python 2's strings are bytes.
    """
    try:
        with path.open("rb") as file:
            found = _Plain(file, encoding="bytes").load()
        if isinstance(found, dict):
            return {key: _finished(value) for key, value in found.items()}
        return _finished(found)
    except (OSError, MemoryError, RecursionError) as error:
        raise ConfigError("file", str(path), "a file that can be read", f"{fix} ({error})") from error
    except Exception as error:  # a malformed pickle can raise anything
        allowed = "a pickle of plain data and byte arrays"
        raise ConfigError("file", str(path), allowed, f"{fix} ({type(error).__name__}: {error})") from error


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which plain data does not need") from None


class _Array:
    """An ndarray of the file, filled by the file's next step."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _ByteType) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array whose parts are not bytes")
        if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise pickle.UnpicklingError(f"it holds an array of shape {shape!r}")
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C").copy()


class _ByteType:
    """The file's dtype u1."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        if any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("it holds an array of records")


def _finished(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.values is None:
            raise pickle.UnpicklingError("it holds an array without content")
        return value.values
    if type(value).__module__ == __name__:
        raise pickle.UnpicklingError("it is a part of an array")
    return value


# Instances without attributes, not functions: a pickle may set any attribute of whatever it was given.
class _Reconstruct:
    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        return _Array()  # of no size: nothing is allocated on a file's word


class _Dtype:
    __slots__ = ()

    def __call__(self, code: object, align: object = False, copy: object = False) -> _ByteType:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"it holds an array of {code!r}, not of bytes (u1)")
        return _ByteType()


class _Encode:
    """How Python 3 writes bytes for Python 2."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError(f"it encodes text as {encoding!r}")
        return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): "numpy.ndarray",  # the file only hands it back to _reconstruct
    ("numpy", "dtype"): _Dtype(),
    ("_codecs", "encode"): _Encode(),
}
