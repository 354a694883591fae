"""Costs of samples: a round is split between ranks by cost, so that long samples do not delay a worker."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dynamix.errors import ConfigError
from dynamix.window import Floats, Ints

Lengths = Sequence[float] | Floats | Ints | Tensor | Callable[[int], float]
_MOST = 1e300  # limit of the cost of all samples together
_TRIES = 4  # cuts of a padded round; the best is taken, and more do not improve it


class SampleCosts:
    """The cost of each of n samples: tokens, frames, anything that adds up.

    costs      (n,) above 0
    mean       cost of a sample
    padded     a batch costs its number of samples times the longest of them, not their sum
    checksum   of `costs`

    >>> costs = SampleCosts([5, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 12)
    >>> round_ = costs.cut(np.arange(12), np.array([6, 6]), np.array([1, 1]), np.array([12, 12]))
    >>> round_.counts.tolist(), round_.work.tolist()
    ([2, 10], [6.0, 6.0])
    """

    def __init__(self, lengths: Lengths, samples: int, *, padded: bool = False) -> None:
        self.costs, self.padded = _checked(lengths, samples), padded
        self.mean = float(self.costs.mean())
        self.checksum = hashlib.blake2b(self.costs.tobytes(), digest_size=8).hexdigest()
        # Ranks of the samples by length. All differ, so every sorting algorithm gives the same order on every machine.
        self._place: Ints | None = None
        if padded:
            self._place = np.empty(samples, dtype=np.int64)
            self._place[np.argsort(-self.costs, kind="stable")] = np.arange(samples)

    def cut(
        self, samples: Ints, shares: Ints, low: Ints, high: Ints, *, turn: int = 0, in_pieces: bool = False
    ) -> CutRound:
        """Cut the `samples` (N,) of a micro-step so that each rank's cost is in proportion to its share.

        A pure function of its arguments, the same on every rank. If bounds leave room, a rank's cost differs from its
        part by less than the largest cost of a sample.

        shares      (W,) samples, N in all; a rank with 0 gets none
        low, high   (W,) bounds of a rank's samples; its share itself is always allowed
        turn        padded: a number of this micro-step, by which ranks take turns at the long samples
        in_pieces   padded: a rank's samples pass through the model in several pieces, each padded alone. Samples of a
                    piece are so similar in length that padding is not counted
        """
        low, high = (np.broadcast_to(bound, shares.shape) for bound in (low, high))
        if self._place is None:
            return self._in_order(samples, shares, low, high)
        return self._by_length(samples, shares, low, high, turn, in_pieces)

    def _in_order(self, samples: Ints, shares: Ints, low: Ints, high: Ints) -> CutRound:
        costs = self.costs[samples]
        ends = _within(_ends(costs, shares), shares, low, high)
        work = np.diff(np.append(0.0, np.cumsum(costs))[ends], prepend=0.0) / self.mean
        return CutRound(np.diff(ends, prepend=0), work, None)

    def _by_length(self, samples: Ints, shares: Ints, low: Ints, high: Ints, turn: int, in_pieces: bool) -> CutRound:
        """Give ranks consecutive samples sorted by length, so that there is little padding."""
        assert self._place is not None
        ordered = samples[np.argsort(self._place[samples])]  # longest first
        costs = self.costs[ordered]
        ranks = np.roll(np.arange(shares.size), turn)
        shares, low, high = shares[ranks], low[ranks], high[ranks]
        if in_pieces:
            ends = _within(_ends(costs, shares), shares, low, high)
            paid = np.diff(np.append(0.0, np.cumsum(costs))[ends], prepend=0.0)
        else:
            ends, paid = _evenly_padded(costs, shares, low, high)
        # The sum is that of the unpadded samples: padding is assumed to add the same part in every round.
        work = paid * (costs.sum() / (self.mean * paid.sum()))
        back = np.argsort(ranks)
        counts = np.diff(ends, prepend=0)
        parts = np.split(ordered, ends[:-1])
        return CutRound(counts[back], work[back], np.concatenate([parts[i] for i in back]))


class CutRound(NamedTuple):
    """The cut of a micro-step.

    counts    (W,) samples of each rank
    work      (W,) their cost, in samples of mean cost
    samples   (N,) the first rank's, then the second's, and so on; None: in the given order
    """

    counts: Ints
    work: Floats
    samples: Ints | None


def _ends(costs: Floats, shares: Ints) -> Ints:
    """The ends of each rank's interval (W,), which divide the costs (N,) most nearly in proportion to `shares`."""
    upto, wanted = np.cumsum(costs), np.cumsum(shares)
    targets = upto[-1] * (wanted / wanted[-1])
    at = np.minimum(np.searchsorted(upto, targets), costs.size - 1)
    before = upto[at] - costs[at]
    ends = at + (upto[at] - targets <= targets - before)
    ends[wanted == wanted[-1]] = costs.size
    ends[wanted == 0] = 0
    return np.asarray(ends, dtype=np.int64)


def _within(ends: Ints, shares: Ints, low: Ints, high: Ints) -> Ints:
    """The nearest `ends` at which no rank has fewer or more samples than its bounds allow."""
    least = np.minimum(shares, np.maximum(low, 2))  # batch norm cannot normalise a single sample
    most = np.where(shares > 0, np.maximum(high, shares), 0)
    counts = np.diff(ends, prepend=0)
    if ((counts >= least) & (counts <= most)).all():
        return ends
    total = int(ends[-1])
    floors = (total - np.append(np.cumsum(most[::-1])[::-1][1:], 0)).tolist()  # later ranks have room for the rest
    ceilings = (total - np.append(np.cumsum(least[::-1])[::-1][1:], 0)).tolist()
    end, within = 0, []
    for wish, fewest, largest, floor, ceiling in zip(
        ends.tolist(), least.tolist(), most.tolist(), floors, ceilings, strict=True
    ):
        end = min(max(wish, end + fewest, floor), end + largest, ceiling)
        within.append(end)
    return np.array(within, dtype=np.int64)


def _evenly_padded(costs: Floats, shares: Ints, low: Ints, high: Ints) -> tuple[Ints, Floats]:
    """Ends (W,) with padded costs nearly in proportion to `shares`, and those costs; `costs` are sorted, longest first.

    Each try uses the padded costs of the samples in the cut before it.
    """
    best: tuple[float, Ints, Floats] | None = None
    active, of_samples = shares > 0, costs
    for _ in range(_TRIES):
        ends = _within(_ends(of_samples, shares), shares, low, high)
        counts = np.diff(ends, prepend=0)
        longest = costs[np.minimum(ends - counts, costs.size - 1)]
        paid = counts * longest
        worst = float((paid[active] / shares[active]).max())
        if best is None or worst < best[0]:
            best = worst, ends, paid
        of_samples = np.repeat(longest, counts)
    assert best is not None
    return best[1], best[2]


def _checked(lengths: Any, samples: int) -> Floats:
    fix = "give one cost for each sample of the data set, such as its number of tokens"
    if isinstance(lengths, Tensor):
        given: Any = lengths.detach().cpu().double().numpy()
    elif callable(lengths):
        given = [lengths(i) for i in range(samples)]
    else:
        given = lengths
    try:
        costs = np.array(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError("lengths", type(lengths).__name__, f"{samples} numbers above 0", fix) from error
    if costs.shape != (samples,):
        raise ConfigError("shape of lengths", costs.shape, f"({samples},)", fix)
    wrong = ~(np.isfinite(costs) & (costs > 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        fix = "give an empty sample the cost 1, or leave it out of the data set"
        raise ConfigError(f"lengths[{at}]", float(costs[at]), "a finite number above 0", fix)
    if costs.size and costs.max() > _MOST / costs.size:
        raise ConfigError("largest of lengths", float(costs.max()), f"a sum of at most {_MOST:g}", "use larger units")
    return costs


def costs_by_length(
    lengths: Lengths | None, padded: bool, samples: int, *, apart: bool, fixed: bool
) -> SampleCosts | None:
    """The costs for the `lengths` of `Controller.batch_sampler`. Raises `ConfigError` for arguments that exclude each
    other.

    apart   workers may take local steps
    fixed   the global batch is fixed
    """
    if lengths is None:
        if padded:
            raise ConfigError("padded", padded, "False without lengths", "give lengths=, or leave padded out")
        return None
    if padded and apart:
        fix = "leave padded out: rounds are then cut by the sum of lengths, and each worker trains on a fair sample"
        raise ConfigError("padded", padded, "False with meet='parameters' and meet='auto'", fix)
    if padded and not fixed:
        fix = "leave padded out, or use global_batch='fixed': batches of like samples do not tell the noise scale"
        raise ConfigError("padded", padded, "False with global_batch='adaptive'", fix)
    return SampleCosts(lengths, samples, padded=padded)
