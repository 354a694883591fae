"""Bounds of batch sizes: the user's limits, and checks of sizes whose errors say what to write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Bounds, Ints

Each = int | Sequence[int] | None  # for every worker


@dataclass(frozen=True)
class Limits:
    """Bounds of batch sizes, for `Controller(limits=...)`, which raises `ConfigError` for impossible ones.

    A worker's sizes are samples per micro-batch. With `Controller(micro_batch=...)` they are samples per round: between
    two exchanges of gradients, or averagings of parameters.

    min_batch_size, max_batch_size   of a worker; one number, or one per rank; None: 1 and 8 * batch_size. If both
                      are equal for a worker, it has that many samples from the start
    min_global_batch, max_global_batch   samples per round of all workers; None: the sum at the start, and the most
                      that the workers' sizes allow. Only with global_batch="adaptive"
    quantum           a worker's sizes are multiples of this many samples (torch.compile and cudnn see few shapes)
    max_change        a batch size changes by at most this factor per decision; infinite: no limit

    >>> Limits(max_batch_size=[64, 32], max_global_batch=80).max_batch_size
    [64, 32]
    """

    min_batch_size: Each = None
    max_batch_size: Each = None
    min_global_batch: int | None = None
    max_global_batch: int | None = None
    quantum: int = 1
    max_change: float = math.inf

    def __post_init__(self) -> None:
        for name in ("min_batch_size", "max_batch_size", "min_global_batch", "max_global_batch"):
            if (as_plain := getattr(getattr(self, name), "tolist", None)) is not None:  # from NumPy or torch
                object.__setattr__(self, name, as_plain())

    def beside(self, limits: Limits) -> Limits:
        """These limits, which were passed by name, merged into `limits`. Raises `ConfigError` for one that both set."""
        if not isinstance(limits, Limits):
            raise ConfigError("limits", limits, "a dynamix.Limits", "write limits=dynamix.Limits(max_batch_size=64)")
        own = {name: value for name, value in vars(self).items() if value != getattr(Limits, name)}
        for name, value in own.items():
            if (told := getattr(limits, name)) != getattr(Limits, name):
                raise ConfigError(name, value, f"{told!r}, which limits= says already", f"leave {name} out")
        return dataclasses.replace(limits, **own)


def check_counts(**values: object) -> None:
    """Raise `ConfigError` for the first value that is not a whole number of 1 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(name, value, "a whole number, 1 or more", whole(name, value))


def whole(name: str, value: object) -> str:
    """What to write instead of a value that is not a whole number of 1 or more.

    >>> whole("quantum", 2.0), whole("quantum", "2")
    ('write quantum=2', 'give a number, without quotes')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return "give a number" + ", without quotes" * isinstance(value, str)
    return f"write {name}={round(float(value))}" if math.isfinite(value) and value >= 1 else "give a larger one"


def per_rank(name: str, value: int | Sequence[int], workers: int) -> int | list[int]:
    """One number for all ranks, or a list with one per rank. Raises `ConfigError` for anything else.

    >>> per_rank("max_batch_size", [64, 32], 2)
    [64, 32]
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    sizes = np.asarray(value)
    if sizes.shape not in ((), (workers,)) or sizes.dtype.kind not in "iu":
        allowed = f"one whole number or a list of {workers}, one per rank"
        fix = "match the world size" if sizes.ndim and sizes.shape != (workers,) else whole(name, value)
        raise ConfigError(name, value, allowed, fix)
    return [int(size) for size in sizes] if sizes.ndim else int(sizes)


def starting_sizes(batch_size: int, bounds: Bounds) -> Ints:
    """The size that each worker starts with, int64 (W,): its bound if both are equal, else `batch_size`.

    Raises `ConfigError` for the first rank whose bounds forbid `batch_size`.

    >>> starting_sizes(12, Bounds.of(3, [16, 1, 1], [16, 64, 64])).tolist()
    [16, 12, 12]
    """
    start = np.where(bounds.low == bounds.high, bounds.low, batch_size).astype(np.int64)
    fits = (start >= bounds.low) & (start <= bounds.high) & (start % bounds.quantum == 0)
    if not fits.all():
        rank = int(np.argmin(fits))
        steps = f" in steps of {bounds.quantum}" if bounds.quantum > 1 else ""
        allowed = f"{int(bounds.low[rank])} to {int(bounds.high[rank])}{steps} on rank {rank}"
        raise ConfigError("batch_size", batch_size, allowed, "change batch_size or the bounds")
    return start


def fixed_at(bounds: Bounds, global_batch: int) -> Bounds:
    """`bounds` with the global batch fixed, samples per round. Raises `ConfigError` if they cannot contain it.

    >>> fixed = fixed_at(Bounds.of(2, 1, 64), 96)
    >>> int(fixed.total_low), int(fixed.total_high)
    (96, 96)
    """
    least, most = int(bounds.low.sum()), int(bounds.high.sum())
    if global_batch % bounds.quantum or not least <= global_batch <= most:
        allowed = f"{least} to {most} in steps of {bounds.quantum}, by the workers' bounds"
        fix = "widen min_batch_size and max_batch_size, lower quantum, or use global_batch='adaptive'"
        raise ConfigError("global batch", global_batch, allowed, fix)
    total = np.asarray(global_batch, dtype=np.int64)
    return dataclasses.replace(bounds, total_low=total, total_high=total)
