"""The JSON form of a window in one line: plain lists, packed if there are many workers.

At 1,024 workers plain lists take 400 kB and 20 ms a line, more than most decisions cost. Packed they take a tenth of
the size, each number with an error of at most a quarter of a percent: enough for plots and for fitting costs. With many
more workers, only bytes that zlib shortens well go through it. It is slowest on noise, which it does not shorten.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamix.window import PER_CLUSTER, PER_WORKER, Floats, Ints, Window, plain_floats

PACKED_ABOVE = 64  # workers
RAW_ABOVE = 2048  # workers: the low bytes are noise, and stay uncompressed
_MOST_WORKERS = 2**14
_BEFORE_WORK = PER_WORKER.index("work")  # fields in the oldest records; later ones have more, at the end
_TOP = 15  # exponent of a field's largest value after scaling: the last one of a half float
_ROUNDED = 2  # low bits of a half float that are noise, and cannot be compressed


def window_record(window: Window) -> dict[str, Any]:
    """JSON of a window of one cluster. Above 64 workers its per-worker fields are packed.

    `packed` is base64 of zlib of half floats (fields, W), all high bytes first, each field multiplied by 2^`shift`.
    `sizes` is the same for little-endian 64-bit batch sizes. A value 2^25 times smaller than the largest of its field
    becomes 0; infinities stay. Above 2,048 workers the low bytes of `packed` follow the zlib stream uncompressed.
    """
    if window.workers <= PACKED_ABOVE:
        return window.to_dict()
    halves, shift = np.empty((len(PER_WORKER), window.workers), "<f2"), []
    for row, name in zip(halves, PER_WORKER, strict=True):  # one at a time, so that data stay in the cache
        values = getattr(window, name)
        largest = np.abs(values).max(where=np.isfinite(values), initial=0.0)
        shift.append(_TOP - math.frexp(largest)[1])
        row[:] = np.ldexp(values, shift[-1])
    bits = halves.view("<u2")
    bits += 2 ** (_ROUNDED - 1)
    bits &= 2**16 - 2**_ROUNDED
    sizes = window.batch_size.astype("<i8")
    raw = bits.size if window.workers > RAW_ABOVE else 0
    record = {"workers": window.workers, "packed": _packed(bits, raw), "sizes": _packed(sizes), "shift": shift}
    of_cluster = plain_floats(np.stack([getattr(window, name) for name in PER_CLUSTER]))
    return record | dict(zip(PER_CLUSTER, of_cluster, strict=True))


def unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    """The plain lists of `window_record`, in either form; unknown numbers are None.

    Raises ValueError, TypeError or KeyError for a packed record that is damaged.
    """
    if "packed" not in record:
        return dict(record)
    sizes, values = _arrays(record)
    plain: dict[str, Any] = {"batch_size": sizes.tolist()}
    plain |= zip(values, plain_floats(np.stack(list(values.values()))), strict=True)
    return plain | {name: record[name] for name in PER_CLUSTER}


def window_of(record: Mapping[str, Any], wanted: Sequence[str] = PER_WORKER) -> Window:
    """The window in a record of either form. Fields that this version does not know are left out.

    wanted   fields of workers to read; the others are unknown in the result

    Raises ValueError, TypeError, KeyError or OverflowError for a damaged record.

    >>> window_of({"batch_size": [32, 96], "compute": [0.1, None], "of_a_later_version": 1}).compute.tolist()
    [0.1, nan]
    """
    if "packed" in record:
        sizes, known = _arrays(record, wanted)
    else:
        sizes = np.asarray(record["batch_size"])
        known = {name: record[name] for name in wanted if name in record}
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not 0 < sizes.size <= _MOST_WORKERS or (sizes < 0).any():
        raise ValueError("batch_size is no list of whole numbers, one for each worker")
    return Window.of(sizes, **known, **{name: record[name] for name in PER_CLUSTER if name in record})


def _arrays(record: Mapping[str, Any], wanted: Sequence[str] = PER_WORKER) -> tuple[Ints, dict[str, Floats]]:
    """Batch sizes (W,) and the wanted per-worker fields (W,) by name, of a packed record."""
    workers, shift = record["workers"], np.array(record["shift"], dtype=np.int64)
    fields = PER_WORKER[: max(shift.size, _BEFORE_WORK)]
    if not isinstance(workers, int) or not 0 < workers <= _MOST_WORKERS or shift.shape != (len(fields),):
        raise ValueError("workers or shift are impossible")
    rows = [i for i, name in enumerate(fields) if name in wanted]
    halves = _planes(record["packed"], 2 * len(fields) * workers, 2).reshape(2, len(fields), workers)[:, rows]
    values = np.ldexp(_values(halves, "<f2").astype(np.float64), -np.clip(shift[rows], -2000, 2000)[:, None])
    sizes = _values(_planes(record["sizes"], 8 * workers, 8), "<i8")
    return sizes, dict(zip((fields[i] for i in rows), values, strict=True))


def _packed(values: np.ndarray[Any, Any], raw: int = 0) -> str:
    """`values` packed by byte planes; the last `raw` bytes follow uncompressed."""
    # Bytes of one kind lie together, because neighbours are alike and zlib finds that.
    planes = values.view(np.uint8).reshape(-1, values.itemsize)[:, ::-1].T.tobytes()
    end = len(planes) - raw
    # Runs and Huffman codes take half the time of searching for repeated strings, and give a shorter result.
    packer = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return base64.b64encode(packer.compress(planes[:end]) + packer.flush() + planes[end:]).decode()


def _planes(text: str, length: int, itemsize: int) -> np.ndarray[Any, Any]:
    """(itemsize, n) bytes of n values, the highest first."""
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b64decode(text, validate=True), length + 1)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(str(error)) from error
    raw += unpacker.unused_data[: length + 1]
    if len(raw) != length:
        raise ValueError(f"{len(raw)} bytes where {length} are needed")
    return np.frombuffer(raw, np.uint8).reshape(itemsize, -1)


def _values(planes: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """The values (...) of `_planes` (itemsize, ...)."""
    return np.ascontiguousarray(np.moveaxis(planes[::-1], 0, -1)).view(kind)[..., 0]
