"""Traces of many workers at once, as arrays, and other ways to sum by gossip that were tried beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamix.window import Floats, Ints

Keys = NDArray[np.uint32]
NONE = np.uint32(0xFFFFFFFF)
LOSS = 0.05  # of packets


def lowest(one: Keys, two: Keys) -> Keys:
    """The lowest keys of both, each once: (n, K) and (n, K), sorted, to (n, K)."""
    both = np.concatenate([one, two], axis=1)
    both.sort(axis=1)
    again = both[:, 1:] == both[:, :-1]
    both[:, 1:][again] = NONE
    both.sort(axis=1)
    return both[:, : one.shape[1]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Who talks to whom at one time, each with one other: `asking` sends, `asked` answers.

    heard     the message reached who is asked
    answered   and so did the answer
    """

    asking: Ints
    asked: Ints
    heard: NDArray[np.bool_]
    answered: NDArray[np.bool_]


def paired(rng: np.random.Generator, who: Ints, loss: float = LOSS) -> Pairs:
    """Pairs drawn among `who`."""
    drawn = rng.permutation(who)
    half = len(drawn) // 2
    arrives = rng.random((2, half)) >= loss
    return Pairs(drawn[:half], drawn[half : 2 * half], arrives[0], arrives[0] & arrives[1])


class MarkArrays:
    """What W workers hold of one round: keys (W, K), whose worker `owner` says. It is `GossipedTraces` of one round."""

    def __init__(self, rng: np.random.Generator, workers: int, size: int) -> None:
        self.rank = rng.permutation(workers).astype(np.uint32)  # priority of each worker's mark
        self.owner = np.argsort(self.rank)
        self.keys: Keys = np.full((workers, size), NONE)
        self.left = np.zeros(workers, dtype=bool)
        self.values = np.zeros((workers, 2))  # speed and meeting_s, by worker

    def leave(self, who: Ints, values: Floats) -> None:
        """Workers `who` leave `values` (n, 2)."""
        who, values = who[~self.left[who]], values[~self.left[who]]
        self.left[who], self.values[who] = True, values
        own = np.full((len(who), self.keys.shape[1]), NONE)
        own[:, 0] = self.rank[who]
        self.keys[who] = lowest(self.keys[who], own)

    def talk(self, pairs: Pairs) -> None:
        """Everybody of `pairs` joins what arrives."""
        one, two = self.keys[pairs.asking], self.keys[pairs.asked]
        joined = lowest(one, two)
        self.keys[pairs.asked] = np.where(pairs.heard[:, None], joined, two)
        self.keys[pairs.asking] = np.where(pairs.answered[:, None], joined, one)

    def forget(self, who: Ints) -> None:
        """Workers `who` lose what they hold."""
        self.keys[who] = NONE

    def sums(self, who: Ints) -> tuple[Floats, Floats]:
        """Of the marks that `who` hold: how many (n,), and their sums (n, 2)."""
        keys = self.keys[who]
        held = keys != NONE
        found = self.values[self.owner[np.where(held, keys, 0)]]
        return held.sum(1).astype(np.float64), (found * held[..., None]).sum(1)


@dataclass(frozen=True, slots=True)
class SumSeen:
    """What workers make of it after some exchanges.

    mean    of all values, as each worker sees it (W,); NaN where it sees none
    bytes   of a message
    """

    mean: Floats
    bytes: float


Way = Callable[[np.random.Generator, Floats, int], list[SumSeen]]
MARK_BYTES, FIELDS = 16, 3


def by_marks(size: int) -> Way:
    """Bottom-k: a uniform sample of `size` workers, the same everywhere in the end."""

    def play(rng: np.random.Generator, values: Floats, exchanges: int) -> list[SumSeen]:
        everybody = np.arange(len(values))
        marks = MarkArrays(rng, len(values), size)
        marks.leave(everybody, np.stack([values, values], 1))
        made = []
        for _ in range(exchanges):
            marks.talk(paired(rng, everybody))
            count, sums = marks.sums(everybody)
            made.append(SumSeen(sums[:, 0] / count, MARK_BYTES * float(count.mean())))
        return made

    return play


def by_extrema(size: int) -> Way:
    """Extrema propagation (Baquero, Almeida and Menezes): the least of exponentials whose rates are the values.

    A mean takes two sums, the workers' and the values'; they share their draws, which cancels most of the error.
    """

    def play(rng: np.random.Generator, values: Floats, exchanges: int) -> list[SumSeen]:
        draws = rng.exponential(size=(len(values), size))
        held = np.concatenate([draws, draws / values[:, None]], axis=1).astype(np.float32)
        made = []
        for _ in range(exchanges):
            pairs = paired(rng, np.arange(len(values)))
            one, two = held[pairs.asking], held[pairs.asked]
            least = np.minimum(one, two)
            held[pairs.asked] = np.where(pairs.heard[:, None], least, two)
            held[pairs.asking] = np.where(pairs.answered[:, None], least, one)
            mean = held[:, :size].sum(1) / held[:, size:].sum(1)
            made.append(SumSeen(mean.astype(np.float64), 4.0 * size * FIELDS))
        return made

    return play


def by_push_sum(rng: np.random.Generator, values: Floats, exchanges: int) -> list[SumSeen]:
    """Push-sum (Kempe, Dobra and Gehrke): half of what a worker holds goes to another. What is lost is lost."""
    held = np.stack([values, np.ones(len(values))], 1)
    made = []
    for _ in range(exchanges):
        pairs = paired(rng, np.arange(len(values)))
        one, two = held[pairs.asking], held[pairs.asked]
        met = (one + two) / 2
        held[pairs.asked] = np.where(pairs.heard[:, None], met, two)
        held[pairs.asking] = np.where(pairs.answered[:, None], met, one / 2)
        made.append(SumSeen(held[:, 0] / held[:, 1], 4.0 * FIELDS))
    return made


def by_table(rng: np.random.Generator, values: Floats, exchanges: int) -> list[SumSeen]:
    """Every worker's newest entry, by worker: exact in the end, and as long as there are workers."""
    workers = len(values)
    known = np.packbits(np.eye(workers, dtype=bool), axis=1)
    made = []
    for _ in range(exchanges):
        pairs = paired(rng, np.arange(workers))
        one, two = known[pairs.asking], known[pairs.asked]
        both = one | two
        known[pairs.asked] = np.where(pairs.heard[:, None], both, two)
        known[pairs.asking] = np.where(pairs.answered[:, None], both, one)
        count, total = np.zeros(workers), np.zeros(workers)
        for first in range(0, workers, 500):
            held = np.unpackbits(known[first : first + 500], axis=1, count=workers)
            count[first : first + 500], total[first : first + 500] = held.sum(1), held @ values
        made.append(SumSeen(total / count, MARK_BYTES * float(count.mean())))
    return made


WAYS: dict[str, Way] = {
    "marks": by_marks(32),
    "extrema": by_extrema(32),
    "push-sum": by_push_sum,
    "table": by_table,
}


def ways_to_sum(
    workers: int, seed: int, *, exchanges: int = 16, names: tuple[str, ...] = tuple(WAYS)
) -> dict[str, Any]:
    """By way: error of the mean and how far workers are apart (both in parts of it), and bytes, by exchange."""
    found: dict[str, Any] = {}
    for name in names:
        rng = np.random.default_rng([seed, workers])
        values = np.exp(0.5 * rng.standard_normal(workers))
        readings = WAYS[name](rng, values, exchanges)
        found[name] = {
            "error": [float(np.sqrt(np.mean((r.mean / values.mean() - 1) ** 2))) for r in readings],
            "apart": [float(np.std(r.mean) / np.mean(r.mean)) for r in readings],
            "bytes": [r.bytes for r in readings],
        }
    return found
