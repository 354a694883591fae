"""What is done next: a step as all ranks plan it, one rank's pieces of it, and where the next step begins."""

from dataclasses import dataclass, field
from functools import cached_property

from dynamix.window import Ints


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in one micro-step; identical on all ranks.

    index     micro-step since the job began
    epoch     epoch it belongs to
    start     position in the epoch at which this step's union batch begins (samples dealt before it, all ranks)
    counts    (W,) samples per rank really used; 0: this rank gets a flagged placeholder batch
    group     (A, W) counts of all micro-steps of this optimizer step
    micro     0..A-1 within the optimizer step
    regular   counts equal the allocation in force (False at the end of an epoch that they do not divide)
    last      last micro-step of the epoch
    """

    index: int
    epoch: int
    start: int
    counts: Ints
    group: Ints
    micro: int
    regular: bool
    last: bool

    @cached_property
    def samples(self) -> int:
        """Samples of this optimizer step, of all ranks and micro-steps."""
        return int(self.group.sum())

    @property
    def first(self) -> bool:
        """Whether the optimizer step is its epoch's first."""
        return self.start == (int(self.group[: self.micro].sum()) if self.micro else 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch of this rank's loop: a part of its share of an optimizer step.

    plan       of the micro-step that it belongs to
    number     0 to of - 1, of all pieces of this rank in the optimizer step
    of         how many those are; they differ by rank where shares are cut by size
    samples    really used; 0: a flagged placeholder batch
    offset     samples of this rank's share of the micro-step before it
    following  samples of the next piece; 0 after the last
    share      samples of this rank in the optimizer step
    by_size    whether shares are cut by size, so that no other rank need have a batch of this number
    """

    plan: StepPlan
    number: int
    of: int
    samples: int
    offset: int
    following: int
    share: int
    by_size: bool

    @property
    def last(self) -> bool:
        """Whether the optimizer step comes after it."""
        return self.number == self.of - 1


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer step as planned: counts (A, W), the allocation (W,) they come from, whether the epoch ends.

    total     samples of a micro-step (A,)
    regular   whether a micro-step's counts equal the allocation (A,)
    """

    counts: Ints
    sizes: Ints
    final: bool
    total: tuple[int, ...] = field(init=False)
    regular: tuple[bool, ...] = field(init=False)

    @property
    def samples(self) -> int:
        """Of all micro-steps and ranks."""
        return sum(self.total)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", tuple(self.counts.sum(1).tolist()))
        object.__setattr__(self, "regular", tuple((self.counts == self.sizes).all(1).tolist()))


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next micro-step begins. `group` is the optimizer step under way, None between optimizer steps."""

    epoch: int
    position: int
    index: int
    taken: Ints  # (W,) samples per rank in the cut in force; matters where every rank has samples of its own
    group: Group | None = None
    micro: int = 0
    finished: bool = False


def pieces_of(share: int, most: int) -> list[int]:
    """`share` samples in pieces of `most`, and before them what is left, in halves and quarters of it: few shapes.

    What neither makes is a piece of its own; where it would be a single sample, which batch norm cannot normalise, the
    piece after it gives one up. The last piece is the largest: what has accumulated is scaled to its weight.

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
