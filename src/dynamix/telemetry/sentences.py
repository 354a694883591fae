"""Describes a run in plain sentences."""

from __future__ import annotations

import math

import numpy as np

from dynamix.projection import project
from dynamix.telemetry.run import RunView
from dynamix.window import Bounds

PARTS = {"compute": "computing", "data": "loading and preparing", "network": "exchanging gradients", "wait": "waiting"}
_FEW = 8  # windows; fewer show no trend


def sentences(view: RunView) -> list[str]:
    """The few sentences to read first about a run."""
    said = [_what_ran(view)]
    said += [text for text in (_waiting(view), _slowest(view), _sizes(view), _trouble(view)) if text]
    return said


def headline(view: RunView) -> str:
    """The one sentence for the top of a page."""
    wait = view.mean_waiting
    if view.workers == 1 or math.isnan(wait):
        return f"{_workers(view)} trained at {number(view.samples_per_s)} samples a second."
    early, late = _early_and_late(view)
    if early is not None and late is not None and early - late > 0.05:
        return (
            f"{_workers(view)} spent {percent(early)} of their time waiting for slower ones at first, and "
            f"{percent(late)} at the end."
        )
    return f"{_workers(view)} spent {percent(wait)} of their time waiting for slower ones."


def _workers(view: RunView) -> str:
    fewest = f"{view.fewest:,} to " if view.fewest < view.workers else ""
    return "1 worker" if view.workers == 1 else f"{fewest}{view.workers:,} workers"


def _what_ran(view: RunView) -> str:
    windows = "1 window" if view.windows == 1 else f"{view.windows:,} windows"
    begun = f" It went on from a saved state, at sample {view.began_at:,.0f}." if view.began_at else ""
    return (
        f"{_workers(view)} used {view.trained:,.0f} samples in {seconds(view.seconds)}, "
        f"{number(view.samples_per_s)} a second, in {windows}.{begun}"
    )


def _early_and_late(view: RunView) -> tuple[float | None, float | None]:
    """Mean part of the time that workers waited, in the first and the last tenth of the run."""
    waiting = view.series.mean("waiting")
    if view.windows < _FEW or not np.isfinite(waiting).any():
        return None, None
    tenth = max(len(waiting) // 10, 1)
    parts = [part[np.isfinite(part)] for part in (waiting[:tenth], waiting[-tenth:])]
    early, late = (float(part.mean()) if part.size else None for part in parts)
    return early, late


def _waiting(view: RunView) -> str:
    """The parts of the whole job's time."""
    parts = {name: float(np.nan_to_num(values).sum()) for name, values in view.parts().items()}
    total = sum(parts.values())
    if not total:
        return ""
    # Rounded one by one they would not always add up to 100.
    shares = project(list(parts.values()), Bounds.of(len(parts), 0, 100), total=100).tolist()
    told = [f"{share} % {PARTS[name]}" for name, share in zip(parts, shares, strict=True) if share]
    return f"Over the whole run a worker's time was {listed(told)}."


def _slowest(view: RunView) -> str:
    each = view.seconds_per_sample
    known = np.flatnonzero(np.isfinite(each))
    if known.size < 2:
        return ""
    slow, fast = known[each[known].argmax()], known[each[known].argmin()]
    ratio = each[slow] / each[fast]
    if ratio < 1.1:
        return "All workers take about the same time for a sample."
    return (
        f"Worker {slow} is the slowest: it takes {number(ratio, 2)} times as long for a sample as worker {fast}, "
        "the fastest."
    )


def _sizes(view: RunView) -> str:
    first, now = view.start_sizes, view.sizes
    if not view.changes.count or first.shape != now.shape:
        return "" if view.changes.count else "Batch sizes never changed."
    before, after = int(first.sum()), int(now.sum())
    total = f"the global batch stayed at {after:,}" if before == after else f"the global batch {before:,} to {after:,}"
    return (
        f"Batch sizes changed {view.changes.count:,} times: from {_range(first)} samples a worker to {_range(now)}, "
        f"{total}."
    )


_TROUBLE = {
    "late": ("decision came too late", "decisions came too late"),
    "failed": ("decision failed", "decisions failed"),
    "fault": ("fault of the policy", "faults of the policy"),
    "dropped": ("gap in the events file", "gaps in the events file"),
    "restart": ("restart", "restarts"),
    "pause": ("long time outside of measured steps", "long times outside of measured steps"),
    "guard": ("switch between policy and rule", "switches between policy and rule"),
    "workers": ("change of the number of workers", "changes of the number of workers"),
}


def _trouble(view: RunView) -> str:
    counts = view.notices.counts
    told = [f"{counts[kind]:,} {names[counts[kind] > 1]}" for kind, names in _TROUBLE.items() if counts[kind]]
    return (
        f"There were {listed(told)}." if told and told[0][:2] != "1 " else f"There was {listed(told)}." if told else ""
    )


def _range(sizes: np.ndarray) -> str:
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def listed(parts: list[str]) -> str:
    """
    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def number(value: float, digits: int = 3) -> str:
    """A number in readable form.

    >>> number(1234567.0), number(0.01234), number(12.0), number(float("nan"))
    ('1,230,000', '0.0123', '12', 'an unknown number of')
    """
    if not math.isfinite(value):
        return "an unknown number of"
    if value == 0:
        return "0"
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) or rounded == int(rounded) else f"{rounded:,g}"


def percent(part: float) -> str:
    """
    >>> percent(0.256), percent(0.004), percent(0.0)
    ('26 %', '0.4 %', '0 %')
    """
    return f"{100 * part:.1f} %" if 0 < abs(part) < 0.01 else f"{100 * part:.0f} %"


def seconds(value: float) -> str:
    """
    >>> seconds(0.0321), seconds(45.0), seconds(200.0), seconds(9000.0)
    ('32.1 ms', '45.0 s', '3 min 20 s', '2 h 30 min')
    """
    if not math.isfinite(value):
        return "an unknown time"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
