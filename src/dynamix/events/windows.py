"""A window as one line's JSON holds it: plain lists, and packed where there are many workers.

At 1,024 workers plain lists are 400 kB and 20 ms a line, which is more than most decisions cost. Packed they are a
tenth of the size, each number right to a quarter of a percent: enough for plots and for fitting costs.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dynamix.window import PER_CLUSTER, PER_WORKER, Floats, Window

PACKED_ABOVE = 64  # workers
_MOST_WORKERS = 2**14
_TOP = 15  # exponent that a field's largest value gets: the last that a half float has
_ROUNDED = 2  # low bits of a half float, which are noise that no packing makes shorter


def window_record(window: Window) -> dict[str, Any]:
    """JSON of a window of one cluster. Above 64 workers its per-worker fields are packed.

    `packed` is base64 of zlib of half floats (fields, W), all high bytes first, each field multiplied by 2^`shift`;
    `sizes` the same of little-endian 64-bit batch sizes. What is 2^25 times smaller than the largest of its field
    becomes 0, infinities stay.
    """
    if window.workers <= PACKED_ABOVE:
        return window.to_dict()
    values = np.stack([getattr(window, name) for name in PER_WORKER])
    _, exponents = np.frexp(np.where(np.isfinite(values), np.abs(values), 0.0).max(1))
    halves = np.ldexp(values, _TOP - exponents[:, None]).astype("<f2").view("<u2")
    halves = (halves + 2 ** (_ROUNDED - 1)) >> _ROUNDED << _ROUNDED
    of_cluster = {name: _plain(getattr(window, name)) for name in PER_CLUSTER}
    shift = (_TOP - exponents).tolist()
    sizes = window.batch_size.astype("<i8")
    return {"workers": window.workers, "packed": _packed(halves), "sizes": _packed(sizes), "shift": shift} | of_cluster


def unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    """The plain lists of `window_record`, whichever form it has; unknown numbers are None.

    Raises ValueError, TypeError or KeyError for a packed record that is damaged.
    """
    if "packed" not in record:
        return dict(record)
    workers, shift = record["workers"], np.array(record["shift"], dtype=np.int64)
    if not isinstance(workers, int) or not 0 < workers <= _MOST_WORKERS or shift.shape != (len(PER_WORKER),):
        raise ValueError("workers or shift are impossible")
    halves = _bytes(record["packed"], 2 * len(PER_WORKER) * workers, 2).view("<f2").reshape(len(PER_WORKER), workers)
    values = np.ldexp(halves.astype(np.float64), -np.clip(shift, -2000, 2000)[:, None])
    sizes = _bytes(record["sizes"], 8 * workers, 8).view("<i8")
    plain: dict[str, Any] = {"batch_size": sizes.tolist()}
    plain |= {name: _plain(row) for name, row in zip(PER_WORKER, values, strict=True)}
    return plain | {name: record[name] for name in PER_CLUSTER}


def _packed(values: np.ndarray[Any, Any]) -> str:
    # Bytes of one kind together: neighbours are alike, and zlib finds that.
    planes = values.view(np.uint8).reshape(-1, values.itemsize)[:, ::-1].T
    # Runs and Huffman codes: half the time of looking for repeated strings, and shorter.
    packer = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return base64.b64encode(packer.compress(planes.tobytes()) + packer.flush()).decode()


def _bytes(text: str, length: int, itemsize: int) -> np.ndarray[Any, Any]:
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), length + 1)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(str(error)) from error
    if len(raw) != length:
        raise ValueError(f"{len(raw)} bytes where {length} are needed")
    planes = np.frombuffer(raw, np.uint8).reshape(itemsize, -1)
    return np.ascontiguousarray(planes.T[:, ::-1]).reshape(-1)


def _plain(values: Floats) -> Any:
    known = values.astype(object)
    known[~np.isfinite(values)] = None
    return known.tolist()
