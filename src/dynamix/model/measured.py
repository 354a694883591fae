"""Figures of a job before anything is fitted: seconds, the base batch, the noise scale."""

import functools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from dynamix.model.state import UNKNOWN
from dynamix.window import Floats, Window

Asked = ParamSpec("Asked")


def asked_once(measure: Callable[Asked, Floats]) -> Callable[Asked, Floats]:
    """`measure` with a cache of its newest answer: several parts of a model ask for the same figure of a window.

    Neither the arguments nor the answer may be changed in place.
    """
    latest: tuple[tuple[Any, ...], Floats] = (), UNKNOWN

    @functools.wraps(measure)
    def answer(*of: Asked.args, **named: Asked.kwargs) -> Floats:
        nonlocal latest
        kept = latest  # read once: another thread may ask about another window
        if not kept[0] or not all(map(operator.is_, kept[0], of)):
            latest = kept = of, measure(*of, **named)
        return kept[1]

    return answer


@asked_once
def busy_seconds(window: Window) -> Floats:
    """Seconds (..., W) of computing and loading per optimizer step; NaN where unknown or idle."""
    busy = window.compute + _finite(window.data)
    return np.where((window.batch_size > 0) & (busy > 0) & np.isfinite(busy), busy, np.nan)


@asked_once
def slowest_seconds(window: Window) -> Floats:
    """Mean over steps of the slowest worker's seconds, (...): for any worker, its computing plus its waiting."""
    arrived = window.compute + _finite(window.wait)
    seen = np.where(np.isnan(window.wait), np.nan, arrived)
    return np.fmax(mean_of_known(seen), _max_of_known(window.compute))


@asked_once
def exposed_seconds(window: Window) -> Floats:
    """Seconds (...) of a step that the exchange adds to the slowest worker's computing; NaN if unknown."""
    return mean_of_known(np.where(window.communication >= 0, window.communication, np.nan))


def step_seconds(window: Window) -> Floats:
    """Seconds (...) of an optimizer step: the slowest worker's computing plus the exposed exchange.

    An unknown exchange counts as 0; NaN if no worker was timed.
    """
    return np.asarray(slowest_seconds(window) + np.nan_to_num(exposed_seconds(window)))


@asked_once
def base_total(window: Window) -> Floats:
    """The base batch (...) in samples per round, summed over workers; the current total if unknown."""
    base = window.base_batch
    return np.where(np.isfinite(base) & (base > 0), base, np.maximum(window.batch_size.sum(-1), 1))


def noise_scale(window: Window) -> Floats:
    """The noise scale (...) in samples, limited to 1/1,000 to 1,000 times the base batch; NaN if unknown."""
    base = base_total(window)
    return np.asarray(np.clip(window.noise_scale, base / 1e3, base * 1e3))


def mean_of_known(x: Floats) -> Floats:
    """Mean of the finite values over the last axis; NaN if there are none."""
    known = np.isfinite(x)
    if known.all():
        return np.asarray(x.sum(-1) / x.shape[-1])
    count = known.sum(-1)
    return np.where(count > 0, np.where(known, x, 0.0).sum(-1) / np.maximum(count, 1), np.nan)


def median_of_known(x: Floats) -> Floats:
    """Lower median of the finite values over the last axis; NaN if there are none.

    >>> float(median_of_known(np.array([3.0, np.nan, 1.0, 2.0, 9.0])))
    2.0
    """
    last = np.maximum(np.isfinite(x).sum(-1, keepdims=True) - 1, 0)
    ordered = np.sort(x, axis=-1)
    if x.ndim == 1:  # `take_along_axis` costs as much as the sort
        return np.asarray(ordered[last[0] // 2])
    return np.asarray(np.take_along_axis(ordered, last // 2, -1)[..., 0])


def _finite(x: Floats) -> Floats:
    return np.where(np.isfinite(x), x, 0.0)


def _max_of_known(x: Floats) -> Floats:
    most = np.where(np.isfinite(x), x, -np.inf).max(-1)
    return np.where(np.isfinite(most), most, np.nan)
