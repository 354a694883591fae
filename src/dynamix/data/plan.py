"""Plans: a round as all ranks plan it, its micro-steps, one rank's pieces, and the place where the next one begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynamix.data.lengths import CutRound
from dynamix.window import Floats, Ints


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer step as planned: counts (A, W), the allocation (W,) they come from, whether the epoch ends.

    apart, piece   as of its `Round`
    samples   of all micro-steps and ranks
    total     samples of a micro-step (A,)
    regular   whether what is dealt in a micro-step equals the allocation (A,)
    cuts      where samples are cut by what they cost, each micro-step (A,); a rank's count is then not its share
    work      what the counts cost, in samples of mean cost (A, W); None where that is not known
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
        """Shares `counts` that are dealt as they are."""
        total, regular = counts.sum(1).tolist(), (counts == sizes).all(1).tolist()
        return cls(counts, sizes, apart, piece, final, sum(total), tuple(total), tuple(regular))

    def cut(self, cuts: list[CutRound]) -> Group:
        """The same samples, cut otherwise."""
        counts, work = np.stack([cut.counts for cut in cuts]), np.stack([cut.work for cut in cuts])
        return replace(self, counts=counts, cuts=tuple(cuts), work=work)


class Round(NamedTuple):
    """The work of every rank between two optimizer steps of all, or two meetings over parameters; alike on all ranks.

    index     rounds since the job began
    epoch     epoch it belongs to
    start     position in the epoch at which it begins (samples dealt before it, all ranks)
    counts    (A, W) samples per rank really used, of each of its micro-steps
    samples   of all ranks and micro-steps
    regular   what its last micro-step deals equals the allocation in force (not at the end of an epoch that is cut)
    first     it is its epoch's first
    last      it is its epoch's last
    apart     every piece of it is an optimizer step of its rank's own, and ranks meet over parameters after it
    piece     samples of such a step; 0: a rank's share is one, or gradients meet
    work      (A, W) what the samples of `counts` cost, in samples of mean cost; None where that is not known
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
        """Samples of all ranks' steps that are taken at the same time, where each takes its own of a `piece`."""
        return self.piece * len(self.counts[0])

    def dealt_to(self, rank: int) -> tuple[float, float] | None:
        """Samples of this rank, and what they cost; None where that is not known."""
        if self.work is None:
            return None
        return float(self.counts[:, rank].sum()), float(self.work[:, rank].sum())


class StepPlan(NamedTuple):
    """The work of every rank in one micro-step of a round; identical on all ranks.

    round     that it belongs to
    micro     0 to A - 1 within the round
    start     position in the epoch at which this step's union batch begins (samples dealt before it, all ranks)
    counts    (W,) samples per rank really used; 0: this rank gets a flagged placeholder batch
    regular   what was dealt equals the allocation in force (False at the end of an epoch that they do not divide)
    last      last micro-step of the epoch
    order     (N,) indices of the micro-step's samples, rank by rank; None: as they come in the epoch's order
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
        """Those of its round, of all ranks and micro-steps."""
        return self.round.samples


class Piece(NamedTuple):
    """One batch of this rank's loop: a part of its share of a round.

    round      that it belongs to
    plan       of the micro-step that it belongs to
    number     0 to of - 1, of all pieces of this rank in the round
    of         how many those are; they differ by rank where shares are cut by size
    last       the round ends with it
    samples    really used; 0: a flagged placeholder batch
    before     samples of the micro-step that are other ranks', before this rank's
    offset     samples of this rank's share of the micro-step before it
    following  samples of the next piece; 0 after the last
    share      samples of this rank in the round
    by_size    whether shares are cut by size, so that no other rank need have a batch of this number
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
    """The place where the next micro-step begins. `group` and `round` are those under way, None between rounds."""

    epoch: int
    position: int
    index: int  # type: ignore[assignment]
    taken: Ints  # (W,) samples per rank in the cut in force; matters where every rank has samples of its own
    group: Group | None = None
    round: Round | None = None
    micro: int = 0
    finished: bool = False


def pieces_of(share: int, most: int) -> list[int]:
    """`share` samples in pieces of `most`, and before them what is left, in halves and quarters of it: few shapes.

    The rest is a piece of its own; if that would be a single sample, which batch norm cannot normalise, the piece after
    it gives one up. The last piece is the largest: what has accumulated is scaled to its weight.

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
