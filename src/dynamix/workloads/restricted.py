"""Reads pickles of plain data and byte arrays, and nothing else.

A pickle is a program: an ordinary unpickler calls whatever its file names. Here a file can name four things, all of which
are ours: they make byte arrays and bytes. Everything else, and every malformed file, is a `ConfigError`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError

_ARRAY_TYPE = "numpy.ndarray"  # the pickle only hands it back to _reconstruct


def load_plain(path: Path, *, fix: str) -> Any:
    """Dicts, lists, tuples, numbers, bytes, strings and uint8 arrays pickled by Python 2 or 3; Python 2's strings are bytes.

    fix   what the user should do about a file that is none, for the error
    """
    try:
        with path.open("rb") as file:
            return _Plain(file, encoding="bytes").load()
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


def _reconstruct(kind: object, shape: object, code: object) -> NDArray[np.uint8]:
    """An empty array; the pickle's next step fills it. The shape is ignored: nothing is allocated on a file's word."""
    return np.empty(0, dtype=np.uint8)


def _dtype(code: str | bytes, align: object = False, copy: object = False) -> np.dtype[np.uint8]:
    if code not in ("u1", b"u1", "uint8", b"uint8"):
        raise pickle.UnpicklingError(f"it holds an array of {code!r}, not of bytes (u1)")
    return np.dtype("u1", copy=True)  # a copy, as the pickle's next step writes to it


def _encode(text: str, encoding: str | bytes) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it encodes text as {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any] | str] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _ARRAY_TYPE,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}
