"""Plans: a round of all ranks, its micro-steps, one rank's pieces, and the place where the next micro-step begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynamix.data.lengths import CutRound
from dynamix.window import Floats, Ints


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer step as planned: counts (A, W), their allocation (W,), and whether the epoch ends.

    apart, piece   as in its `Round`
    samples   of all micro-steps and ranks
    total     samples of a micro-step (A,)
    regular   whether the counts of a micro-step equal the allocation (A,)
    cuts      if samples are split by cost, the cut of each micro-step (A,); a rank's count is then not its share
    work      cost of the counts, in samples of mean cost (A, W); None if unknown
    """

    counts: Ints
    sizes: Ints
    apart: bool
    piece: int
    final: bool
    samples: int
    total: tuple[int, ...]
    regular: tuple[bool, ...]
    cuts: tuple[CutRound, ...] | None = None
    work: Floats | None = None

    @classmethod
    def of(cls, counts: Ints, sizes: Ints, *, apart: bool, piece: int, final: bool) -> Group:
        """The group with shares `counts`, dealt in order."""
        total, regular = counts.sum(1).tolist(), (counts == sizes).all(1).tolist()
        return cls(counts, sizes, apart, piece, final, sum(total), tuple(total), tuple(regular))

    def cut(self, cuts: list[CutRound]) -> Group:
        """The same samples under another cut."""
        counts, work = np.stack([cut.counts for cut in cuts]), np.stack([cut.work for cut in cuts])
        return replace(self, counts=counts, cuts=tuple(cuts), work=work)


class Round(NamedTuple):
    """The work of every rank between two synchronisations (common optimizer steps, or parameter averagings).

    index     rounds since the job began
    epoch     epoch it belongs to
    start     position in the epoch at which it begins (samples dealt before it, all ranks)
    counts    (A, W) samples per rank really used, of each of its micro-steps
    samples   of all ranks and micro-steps
    regular   whether its last micro-step equals the allocation in force (not at the end of an epoch that is cut)
    first     whether it is its epoch's first
    last      whether it is its epoch's last
    apart     every piece is a local step of its rank, and ranks average parameters after the round
    piece     samples of a local step; 0: a rank's share is one, or gradients are averaged
    work      (A, W) cost of the samples in `counts`, in samples of mean cost; None if unknown
    """

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    epoch: int
    start: int
    counts: Ints
    samples: int
    regular: bool
    first: bool
    last: bool
    apart: bool
    piece: int
    work: Floats | None

    @property
    def at_once(self) -> int:
        """Samples of all ranks' simultaneous local steps of one `piece` each."""
        return self.piece * len(self.counts[0])

    def dealt_to(self, rank: int) -> tuple[float, float] | None:
        """Samples of this rank, and their cost; None if unknown."""
        if self.work is None:
            return None
        return float(self.counts[:, rank].sum()), float(self.work[:, rank].sum())


class StepPlan(NamedTuple):
    """The work of every rank in one micro-step of a round; identical on all ranks.

    round     the round that it belongs to
    micro     0 to A - 1 within the round
    start     position in the epoch at which this step's union batch begins (samples dealt before it, all ranks)
    counts    (W,) samples per rank really used; 0: this rank gets a flagged placeholder batch
    regular   whether counts equal the allocation in force (False at the end of an epoch that they do not divide)
    last      last micro-step of the epoch
    order     (N,) indices of the micro-step's samples, rank by rank; None: in the epoch's order
    """

    round: Round
    micro: int
    start: int
    counts: Ints
    regular: bool
    last: bool
    order: Ints | None

    @property
    def index(self) -> int:  # type: ignore[override]
        """Micro-steps since the job began."""
        return self.round.index * len(self.round.counts) + self.micro

    @property
    def epoch(self) -> int:
        """The epoch it belongs to."""
        return self.round.epoch

    @property
    def samples(self) -> int:
        """Samples of its round, of all ranks and micro-steps."""
        return self.round.samples


class Piece(NamedTuple):
    """One batch of this rank's loop: a part of its share of a round.

    round      the round that it belongs to
    plan       of the micro-step that it belongs to
    number     0 to of - 1, among all pieces of this rank in the round
    of         number of those pieces; differs by rank if shares are cut by size
    last       whether the round ends with it
    samples    really used; 0: a flagged placeholder batch
    before     samples of the micro-step that belong to earlier ranks
    offset     samples of this rank's share of the micro-step that come before this piece
    following  samples of the next piece; 0 after the last
    share      samples of this rank in the round
    by_size    whether shares are cut by size, so that other ranks may have no batch of this number
    """

    round: Round
    plan: StepPlan
    number: int
    of: int
    last: bool
    samples: int
    before: int
    offset: int
    following: int
    share: int
    by_size: bool


class Cursor(NamedTuple):
    """The place where the next micro-step begins. `group` and `round` are the current ones, None between rounds."""

    epoch: int
    position: int
    index: int  # type: ignore[assignment]
    taken: Ints  # (W,) samples per rank since the last cut; matters if every rank has its own samples
    group: Group | None = None
    round: Round | None = None
    micro: int = 0
    finished: bool = False


def pieces_of(share: int, most: int) -> list[int]:
    """Cut `share` into pieces of `most` samples, with the remainder first, in halves and quarters: few shapes.

    Otherwise the remainder is one piece. Batch norm cannot normalise a single sample, so then the next piece gives one
    up. The last piece is the largest: accumulated gradients are scaled to its weight.

    >>> pieces_of(32, 8), pieces_of(30, 8), pieces_of(13, 8), pieces_of(17, 8), pieces_of(7, 4), pieces_of(0, 8)
    ([8, 8, 8, 8], [2, 4, 8, 8, 8], [5, 8], [2, 7, 8], [3, 4], [0])
    """
    whole, rest = divmod(share, most)
    pieces = [most] * whole
    half, quarter = (0 if most % n else most // n for n in (2, 4))
    if rest == 1 and most > 2 and pieces:
        return [2, most - 1, *pieces[1:]]
    if quarter > 1 and rest == half + quarter:
        return [quarter, half, *pieces]
    return [rest, *pieces] if rest or not pieces else pieces
