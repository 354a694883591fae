"""The controller's figures for its windows: means over their steps, without a step that contains a pause."""

from typing import NamedTuple

import numpy as np

from dynamix.window import Floats

# As in `dynamix.probes.timing`: a step is omitted if it is longer than PAUSE times every other one, including the last
# RECENT ones.
RECENT, PAUSE = 32, 2.0


class Averaged(NamedTuple):
    """Means over the measured steps of each cluster: (C, W), the exchange (C,), all in seconds.

    busy      true computing; `compute` is the measured one, and `compute_std` its standard deviation over the steps
    wait      for slower workers
    exchange  without its overlap with computing
    work      cost of the samples, in samples of mean cost; None: unknown
    """

    busy: Floats
    compute: Floats
    compute_std: Floats
    wait: Floats
    exchange: Floats
    work: Floats | None


class StepsTaken:
    """The steps of the open windows of C clusters."""

    def __init__(self) -> None:
        self._busy: list[Floats] = []
        self._timed: list[Floats] = []
        self._whole: list[Floats] = []
        self._measured: list[np.ndarray] = []
        self._work: list[Floats] = []

    def add(
        self, busy: Floats, whole: Floats, errors: Floats | None, measured: np.ndarray, work: Floats | None = None
    ) -> None:
        """Add a step: computing (C, W) and the whole of it (C,), seconds.

        errors     factors (C, W) on the measured computing; None: no error
        measured   (C,) whether it belongs to a window
        work       (C, W) cost of the samples; None: unknown
        """
        self._busy.append(busy)
        self._timed.append(busy if errors is None else busy * errors)
        self._whole.append(whole)
        self._measured.append(measured)
        if work is not None:
            self._work.append(work)

    def averaged(self, recent_s: Floats) -> Averaged:
        """The windows' means. `recent_s` (RECENT, C) has the previous whole steps, NaN if there were fewer; it is
        updated with these windows' steps."""
        busy, timed, whole, measured = map(np.stack, (self._busy, self._timed, self._whole, self._measured))
        kept = measured & ~_pauses(np.where(measured, whole, np.nan), recent_s)
        for step, belongs in zip(whole, measured, strict=True):
            recent_s[:, belongs] = np.concatenate([recent_s[1:, belongs], step[None, belongs]])
        count, slowest = kept.sum(0), busy.max(-1)
        steps, freedom = np.where(count > 0, count, np.nan)[:, None], np.where(count > 1, count - 1, np.nan)[:, None]
        compute = _sums(timed, kept) / steps
        scatter = _sums(np.square(timed - compute), kept) / freedom
        wait = ((slowest * kept).sum(0)[:, None] - _sums(busy, kept)) / steps
        exchange = ((whole - slowest) * kept).sum(0) / steps[:, 0]
        true = _sums(busy, measured) / measured.sum(0)[:, None]
        work = _sums(np.stack(self._work), kept) / steps if self._work else None
        return Averaged(true, compute, np.sqrt(scatter), wait, exchange, work)


def _sums(values: Floats, of: np.ndarray) -> Floats:
    """(C, W): sums of (T, C, W) over the steps `of` (T, C)."""
    if of.all():
        return np.asarray(values.sum(0))
    return np.asarray(np.einsum("tcw,tc->cw", values, of.astype(np.float64)))


def _pauses(whole_s: Floats, recent_s: Floats) -> np.ndarray:
    """(T, C): in each window the one step longer than `PAUSE` times every other one, if there is such a step."""
    known = np.nan_to_num(whole_s, nan=0.0)
    ordered = np.sort(np.concatenate([known, np.zeros((1, known.shape[1]))]), axis=0)
    others = np.fmax(ordered[-2], np.nan_to_num(recent_s, nan=0.0).max(0))
    longest = (others > 0) & (ordered[-1] > PAUSE * others)
    return np.asarray((known == ordered[-1]) & longest)
