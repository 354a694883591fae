"""The projection onto bounds: the allocation that satisfies them and is nearest in proportion to a target."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamix.errors import ConfigError
from dynamix.window import Bounds, Floats, Ints


def project(
    target: ArrayLike, bounds: Bounds, *, total: ArrayLike | None = None, current: ArrayLike | None = None
) -> Ints:
    """The allocation nearest in proportion to `target` that satisfies `bounds`; all policies use this projection.

    target   (..., W) desired sizes, finite and not negative; only their proportions matter if `total` is given
    total    (...) desired global size (default: the sum of `target`), clamped to what the bounds allow
    current  (..., W) sizes in force, needed for `bounds.max_change`

    Water-filling at the caps keeps the proportions of all workers that are inside their bounds. Largest remainder
    (ties to the lower rank) gives integers on the grid whose sum is exactly `total`. Returns int64 (..., W).

    >>> project([13.7, 16.5, 19.6, 14.2], Bounds.of(4), total=64).tolist()   # DBS, appendix A
    [14, 16, 20, 14]
    >>> project([1.0, 9.0], Bounds.of(2, 1, 60), total=100).tolist()         # what a cap refuses goes to the rest
    [40, 60]
    """
    wish = np.asarray(target, dtype=np.float64)
    if not ((wish >= 0) & (wish < np.inf)).all():
        bad = wish[~np.isfinite(wish) | (wish < 0)].flat[0]
        raise ConfigError(
            "batch size from the policy", float(bad), "finite and not negative", "check the policy's outputs"
        )
    q = bounds.quantum
    low, high = (bounds.low, bounds.high) if q == 1 else (bounds.low // q, bounds.high // q)
    if current is not None and np.isfinite(bounds.max_change):
        now = np.asarray(current, dtype=np.float64) / q
        # Allow at least one grid step either way, or a small size could never change again.
        low = np.maximum(low, np.minimum(np.ceil(now / bounds.max_change), now - 1).astype(np.int64))
        high = np.minimum(high, np.maximum(np.floor(now * bounds.max_change), now + 1).astype(np.int64))
        low, high = np.minimum(low, bounds.high // q), np.maximum(high, bounds.low // q)
    if total is None and (as_it_is := _if_it_fits(wish / q, low, high, bounds)) is not None:
        return as_it_is * q
    shape = np.broadcast_shapes(wish.shape, low.shape, high.shape)
    wish, low, high = (_spread(x, shape).reshape(-1, shape[-1]) for x in (wish / q, low, high))
    lead, lowest, highest = shape[:-1], low.sum(-1), high.sum(-1)
    asked = wish.sum(-1) if total is None else _spread(np.asarray(total, np.float64) / q, lead).reshape(-1)
    least = np.maximum(lowest, _spread(bounds.total_low // q, lead).reshape(-1))
    most = np.minimum(highest, _spread(bounds.total_high // q, lead).reshape(-1))
    # A rate limit can put the global range out of reach this time; then come as near to it as possible.
    units = np.minimum(np.maximum(np.rint(asked), np.minimum(least, highest)), np.maximum(most, lowest))
    units = units.astype(np.int64)
    sizes: Ints = _largest_remainder(_water_fill(wish, low, high, units), low, high, units).reshape(shape) * q
    return sizes


def _if_it_fits(wish: Floats, low: Ints, high: Ints, bounds: Bounds) -> Ints | None:
    """`wish`, in units of the grid, as integers if it already satisfies the bounds: answers are projected twice."""
    fits = (wish >= low) & (wish <= high) & (wish == np.rint(wish))
    if not fits.all():
        return None
    sizes: Ints = _spread(wish, fits.shape).astype(np.int64)
    total = sizes.sum(-1) * bounds.quantum
    return sizes if ((total >= bounds.total_low) & (total <= bounds.total_high)).all() else None


def _spread(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`np.broadcast_to` only if needed, because it costs more than all arithmetic on a few workers."""
    return x if x.shape == shape else np.broadcast_to(x, shape)


def _water_fill(wish: Floats, low: Ints, high: Ints, units: Ints) -> Floats:
    """Real sizes (n, W) proportional to `wish`, inside [low, high], with sum `units`."""
    peak = wish.max(-1, keepdims=True)
    # Never exactly zero: a worker with a target of 0 can still take samples that the caps of all others exclude.
    weight: Floats = np.maximum(np.divide(wish, peak, out=np.ones_like(wish), where=peak > 0), 1e-9)
    sizes: Floats = weight * (units / weight.sum(-1))[:, None]
    if ((sizes <= high) & (sizes >= low)).all():
        return sizes
    fixed = np.zeros(wish.shape, dtype=bool)
    for _ in range(wish.shape[-1] + 1):
        left = units - np.where(fixed, sizes, 0.0).sum(-1)
        share = np.where(fixed, 0.0, weight)
        total = share.sum(-1)
        scale = np.divide(left, total, out=np.zeros_like(total), where=total > 0)
        sizes = np.where(fixed, sizes, share * scale[:, None])
        over, under = np.maximum(sizes - high, 0.0), np.maximum(low - sizes, 0.0)
        excess, deficit = over.sum(-1, keepdims=True), under.sum(-1, keepdims=True)
        if not ((excess > 1e-9) | (deficit > 1e-9)).any():
            break
        pin_high = (over > 0) & (excess >= deficit)
        pin_low = (under > 0) & (deficit >= excess)
        sizes = np.where(pin_high, high, np.where(pin_low, low, sizes))
        fixed |= pin_high | pin_low
    return np.asarray(np.clip(sizes, low, high))


def _largest_remainder(sizes: Floats, low: Ints, high: Ints, units: Ints) -> Ints:
    """Integers (n, W) in [low, high] with sum `units`, each within one of `sizes`; ties to the lower rank."""
    whole = np.minimum(np.maximum(np.floor(sizes + 1e-9).astype(np.int64), low), high)
    for _ in range(4):
        missing = units - whole.sum(-1)
        if not missing.any():
            break
        sign = np.sign(missing)[:, None]
        room = np.where(sign > 0, whole < high, whole > low)
        rank = np.argsort(np.where(room, -(sizes - whole) * sign, np.inf), axis=-1, kind="stable")
        place = np.empty_like(rank)
        place[np.arange(len(rank))[:, None], rank] = np.arange(rank.shape[-1])
        whole = whole + np.where(room & (place < np.abs(missing)[:, None]), sign, 0)
    return whole
