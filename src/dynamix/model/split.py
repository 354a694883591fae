"""Optimal sizes for affine costs: all workers finish at the same time, and that time is the best one.

Worker i takes alpha_i + beta_i b_i seconds. For a given global batch the slowest worker is earliest if all finish
together: b_i = (T - alpha_i)/beta_i (arXiv 2402.05302), clipped to the bounds. So only one number a cluster is left to
choose, T, by searching for the best goodput (arXiv 2008.12260).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from dynamix.window import Bounds, Floats, Ints

# (finishing times (..., K), global batches (..., K)) -> log goodput (..., K), up to a constant
Objective = Callable[[Floats, Floats], Floats]
_POINTS, _ROUNDS = 17, 3
_GRID, _BESIDE = np.linspace(0.0, 1.0, _POINTS), np.array([-1, 1])
_NEXT_TO = 2.0**-40  # of the whole range


def finishing_at(finish_s: Floats, alpha: Floats, beta: Floats, low: Floats, high: Floats) -> Floats:
    """Real sizes (..., W) with which workers finish at `finish_s` (...), or as near to it as their bounds allow.

    >>> finishing_at(np.array(0.5), np.array([0.1, 0.1]), np.array([1e-3, 4e-3]), np.array(1.0), np.array(350.0))
    array([350., 100.])
    """
    return np.asarray(np.minimum(np.maximum((finish_s[..., None] - alpha) / beta, low), high))


def finish_for(total: Floats, alpha: Floats, beta: Floats, low: Floats, high: Floats) -> Floats:
    """The time (...) at which workers finish a global batch of `total` (...) together.

    Slightly more than the time of the smallest possible batch, which may be 0 s.

    >>> a, b = np.array([0.1, 0.2]), np.array([1e-3, 2e-3])
    >>> round(float(finish_for(np.array(300.0), a, b, np.array(1.0), np.array(1e6))), 6)   # 233.3 and 66.7
    0.333333
    """
    first, last = alpha + beta * low, alpha + beta * high
    most = last.max(-1)
    least = first.min(-1)
    least = least + (most - least) * _NEXT_TO
    smallest, largest = _whole(low, first), _whole(high, first)
    lowest, highest = total <= smallest, total >= largest
    if np.all(lowest | highest):
        return np.asarray(np.where(lowest, least, most))
    # The global batch is piecewise linear in the time: a worker begins to grow at `first` and is full at `last`.
    growing = np.broadcast_to(1 / beta, first.shape)
    times, slopes = np.concatenate([first, last], -1), np.concatenate([growing, -growing], -1)
    order = times.argsort(-1)
    times, slopes = _taken(times, order), _taken(slopes, order)
    rate = slopes.cumsum(-1)
    grown = (rate[..., :-1] * np.diff(times, axis=-1)).cumsum(-1)
    wanted = np.asarray(total - smallest)[..., None]
    piece = np.minimum((grown < wanted).sum(-1, keepdims=True), grown.shape[-1] - 1)
    end, reached, pace = (_taken(x, piece + i) for x, i in ((times, 1), (grown, 0), (rate, 0)))
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = end - np.maximum(reached - wanted, 0.0) / pace
    at = np.clip(np.where(np.isfinite(inside), inside, end)[..., 0], least, most)
    return np.asarray(np.where(lowest, least, np.where(highest, most, at)))


def _taken(x: Floats, at: Ints) -> Floats:
    """`np.take_along_axis` over the last axis; for one cluster by an index, which costs less."""
    return x[at] if x.ndim == 1 else np.take_along_axis(x, at, -1)


def _whole(sizes: Floats, like: Floats) -> Floats:
    """Sum over workers of sizes; a single size stands for all workers."""
    alike = sizes.shape[-1:] != like.shape[-1:]
    return np.asarray((np.broadcast_to(sizes, like.shape) if alike else sizes).sum(-1))


def split(total: Floats, alpha: Floats, beta: Floats, bounds: Bounds) -> Floats:
    """Real sizes (..., W) of sum `total` (...) with the earliest finish of the slowest worker.

    >>> sizes = split(np.array(300.0), np.array([0.1, 0.2]), np.array([1e-3, 2e-3]), Bounds.of(2))
    >>> sizes.round(1).tolist()
    [233.3, 66.7]
    """
    low, high = bounds.low.astype(np.float64), bounds.high.astype(np.float64)
    return finishing_at(finish_for(total, alpha, beta, low, high), alpha, beta, low, high)


def best_split(alpha: Floats, beta: Floats, bounds: Bounds, objective: Objective) -> Floats:
    """Real sizes (..., W) within `bounds` that maximise `objective` over the common finishing time.

    The search uses a grid, evenly spaced in log T between the times of the smallest and the largest allowed global
    batch. It is refined around its best point until neighbours differ by less than about 0.5 %.
    """
    low, high = bounds.low.astype(np.float64), bounds.high.astype(np.float64)
    least, most = bounds.total_low, bounds.total_high
    first = last = finish_for(np.asarray(most, np.float64), alpha, beta, low, high)
    if (least != most).any():
        first = finish_for(np.asarray(least, np.float64), alpha, beta, low, high)
    # Before every worker has finished its smallest batch, a smaller global batch saves no time.
    start = np.log(np.clip(np.where(low > 0, alpha + beta * low, 0.0).max(-1), first, last))
    stop = np.maximum(np.log(last), start)
    if (start == stop).all():  # only one time is possible, for example if the global batch is fixed
        return finishing_at(np.exp(start), alpha, beta, low, high)
    for _ in range(_ROUNDS):
        grid = start[..., None] + (stop - start)[..., None] * _GRID
        finish = np.exp(grid)
        best = np.asarray(objective(finish, _totals(finish, alpha, beta, low, high)).argmax(-1))[..., None]
        beside = _taken(grid, np.minimum(np.maximum(best + _BESIDE, 0), _POINTS - 1))
        start, stop = beside[..., 0], beside[..., 1]
    chosen = _taken(grid, best)[..., 0]
    return finishing_at(np.exp(chosen), alpha, beta, low, high)


def _totals(finish: Floats, alpha: Floats, beta: Floats, low: Floats, high: Floats) -> Floats:
    """Global batches (..., K) of workers that finish together at `finish` (..., K)."""
    if alpha.shape[-1] < finish.shape[-1]:  # the longer axis goes last, so that NumPy's inner loops are long
        sizes = finish[..., None, :] - alpha[..., None]
        sizes /= beta[..., None]
        np.maximum(sizes, low[..., None], out=sizes)
        return np.asarray(np.minimum(sizes, high[..., None], out=sizes).sum(-2))
    sizes = finish[..., None] - alpha[..., None, :]
    sizes /= beta[..., None, :]
    np.maximum(sizes, low[..., None, :], out=sizes)
    return np.asarray(np.minimum(sizes, high[..., None, :], out=sizes).sum(-1))


def at_most(bounds: Bounds, total: Floats) -> Bounds:
    """`bounds` with a global batch of at most `total` (...), rounded up, but not below their least."""
    ceiling = np.maximum(np.ceil(total / bounds.quantum) * bounds.quantum, bounds.total_low)
    return dataclasses.replace(bounds, total_high=np.minimum(bounds.total_high, ceiling).astype(np.int64))
