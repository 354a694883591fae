"""The batch sampler: one seeded order per epoch; the allocation in force cuts every step from it."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch.utils.data import Sampler

from dynamix.data.allocations import Allocations
from dynamix.data.computed_order import COMPUTED, LARGE, Order, Spliced, order_of_epoch
from dynamix.data.cutting import RULES_VERSION, enough, next_group, whole_epoch
from dynamix.data.lengths import SampleCosts
from dynamix.data.order import OrderOptions, SampleOrder, require_equal, require_known
from dynamix.data.plan import Cursor, Group, Piece, StepPlan, pieces_of
from dynamix.data.reader import BatchReader, reader_of
from dynamix.data.selection import SELECTED, Selection
from dynamix.errors import ConfigError, StateError, UsageError, spelling
from dynamix.window import Ints

Partition = Literal["stream", "contiguous"]


@dataclass(frozen=True, slots=True)
class Regions:
    """partition="contiguous": rank i owns order[starts[i] : starts[i] + lengths[i]], cut by the allocation `sizes`."""

    sizes: Ints
    lengths: Ints
    begin: int  # position in the epoch at which this cut was made

    @property
    def starts(self) -> Ints:
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, slots=True)
class Usual:
    """An ordinary optimizer step that can be reused: for the same `entries` of the ledger, in these rounds, and as long
    as at least `least` samples are left."""

    group: Group
    entries: object
    rounds: range
    least: int


class BatchSampler(SampleOrder, Sampler[list[int]]):
    """Batches of unequal size per rank, every sample of an epoch exactly once.

    One permutation per epoch, as `torch.utils.data.DistributedSampler` draws it (a generator seeded with seed + epoch).
    A data set of `LARGE` samples or more is ordered by a `ComputedOrder` of seed and epoch, which takes no memory.
    Micro-step t takes the next B_t entries, and rank i the slice that begins at sum of b_j, j < i. So the order of
    samples does not depend on the split, and a position is one integer. All ranks take the same number of steps;
    `cutting.next_group` has the rules for the end of an epoch. A rank with a share of zero gets a placeholder of 2 real
    indices; `plan().counts[rank] == 0` flags it.

    dataset_size   samples of an epoch: those of the data set, or of the `selection`
    allocations    the ledger that all ranks share; read once per optimizer step
    accumulate     A micro-steps per optimizer step; all have the same allocation
    partition      "stream", or "contiguous": each rank reads its own region of the epoch's order, cut anew
                   by share every epoch (DBS, arXiv 2007.11831, section 3); allocations then apply at epoch ends only
    low, high      bounds per micro-step, a number or (W,); None: no upper bound on what the end of an epoch adds
    costs          of the samples: a step's samples are then cut so that each rank's *cost* is in proportion to its
                   size. The samples of a step stay the same. Not with partition="contiguous"
    size_now       returns the data set's number of samples; called at the start of every epoch, when it must still be
                   `dataset_size`
    selection      the samples of an epoch, if not all of the data set once
    micro_batch, placeholder, owner   as in `SampleOrder`

    Iterating again in the middle of an epoch continues after the last consumed step. After a finished epoch it begins
    the next one, with or without `set_epoch`. Only `consume` (that is, `controller.step`) moves the saved position.
    Raises `ConfigError` if one optimizer step needs more samples than the data set has.

    >>> sampler = BatchSampler(10, Allocations([1, 3]), rank=1, world_size=2, shuffle=False)
    >>> list(sampler)
    [[1, 2, 3], [5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        dataset_size: int,
        allocations: Allocations,
        *,
        seed: int = 0,
        shuffle: bool = True,
        partition: Partition = "stream",
        costs: SampleCosts | None = None,
        size_now: Callable[[], int] | None = None,
        selection: Selection | None = None,
        **shared: Unpack[OrderOptions],
    ) -> None:
        super().__init__(
            allocations,
            **shared,
            draws_alike=costs is None or not costs.padded,
            goes_on_ahead=partition == "stream",  # regions are those of the epoch being consumed
        )
        _require_partition(partition, costs)
        needed = int(allocations.at(allocations.begin).sum())
        if needed > dataset_size:
            raise ConfigError(
                "samples per optimizer step",
                needed,
                f"1 to {dataset_size}, the samples of an epoch",
                "lower batch_size or accumulate, or use a larger data set",
            )
        self.dataset_size, self.shuffle, self.partition = dataset_size, shuffle, partition
        self.seed = _seed(seed, shuffle=shuffle)
        self.size_now, self.costs, self.selection = size_now, costs, selection
        self._selected = dict.fromkeys(SELECTED, "") if selection is None else selection.digests
        self._cuts: list[dict[str, list[int]]] = []  # of this epoch, at earlier world sizes
        self._regions: Regions | None = None
        self._order: tuple[int, Order] | None = None
        # A loaded job keeps its saved order. A subset or weights take as much memory as a drawn order.
        self._order_name = COMPUTED if dataset_size >= LARGE and selection is None else ""
        self._usual: Usual | None = None

    @property
    def compares(self) -> bool:
        """Whether all ranks' batches are drawn and cut alike, so that their figures can be compared."""
        return self.shuffle and self.draws_alike and self.partition == "stream" and self.micro_batch is None

    def __len__(self) -> int:
        """Batches left in this epoch (of the next, after a finished one) if the current allocation stays.

        An estimate: policies change the allocation, and with it the number of steps.
        """
        left = self._batches_left()
        if self.place.position == 0 or self.place.finished:
            self._told.add(left)
        return left

    def epoch_steps(self, sizes: Ints) -> int:
        """Micro-steps of a whole epoch under an allocation (W,)."""
        return self.accumulate * self._whole_epoch(0, sizes)[0]

    def _batches_left(self) -> int:
        now = self.place
        position, rest = 0 if now.finished else now.position, 0
        if now.group is not None:
            rest = self.accumulate - now.micro
            position += int(now.group.counts[now.micro :].sum())
        sizes = self._regions.sizes if self._regions and not now.finished else self.sizes_at(now.index)
        groups, _ = self._whole_epoch(position, sizes)
        if (most := self.most_of_piece(self.allocations.piece_at(now.index // self.accumulate))) is not None:
            return groups * len(pieces_of(int(sizes[self.rank]), most))
        return rest + groups * self.accumulate

    def shares(self) -> list[list[int]]:
        """Indices that every rank takes in the micro-step being consumed, empty for a share of zero.

        For one process that plays all ranks: the samples that the ranks of a job load. Raises `UsageError` with
        regions, whose order is not that of the union batch.
        """
        if self.partition != "stream":
            raise UsageError('shares() needs partition="stream": with regions no two ranks read one order')
        plan = self.plan()
        order, start = self._dealt(plan)
        ends = start + np.cumsum(plan.counts)
        return [order[end - count : end].tolist() for end, count in zip(ends, plan.counts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The loop's place in the data, plain numbers and lists; the same on all ranks, at the last optimizer step."""
        return self._position_state() | {
            "dataset_size": self.dataset_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "partition": self.partition,
            "lengths": "" if self.costs is None else self.costs.checksum,
            "order": self._order_name,
            **self._selected,
            "cuts": [dict(cut) for cut in self._cuts],
            "regions": self._regions_state(),
        }

    def identity(self) -> dict[str, Any]:
        named = ("dataset_size", "seed", "shuffle", "partition", "epoch", "consumed")
        state = self.state_dict()
        padded = {} if self.costs is None else {"padded": self.costs.padded}
        return {name: state.pop(name) for name in named} | state | padded

    def _regions_state(self) -> dict[str, Any] | None:
        """The regions that this epoch has begun to read; None if a load may cut them anew."""
        regions = self._regions
        if regions is None or self._saved.position <= regions.begin:
            return None
        return {
            "sizes": regions.sizes.tolist(),
            "lengths": regions.lengths.tolist(),
            "begin": regions.begin,
            "rules": RULES_VERSION,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise `StateError` if the order of samples would differ from the saved one."""
        require_equal(
            state, dataset_size=self.dataset_size, seed=self.seed, shuffle=self.shuffle, partition=self.partition
        )
        require_known(state["order"])
        for name, mine in self._selected.items():
            if (theirs := state.get(name, "")) != mine:
                told = [f"have the checksum {of}" if of else "were not given" for of in (theirs, mine)]
                why = f"{name} {told[0]} in the checkpoint, and {told[1]} here: it would train on other samples"
                raise StateError(f"{why}; {'pass those of that job' if theirs else f'leave {name} out'}")
        lengths = state["lengths"]
        if lengths and self.costs is not None and lengths != self.costs.checksum:
            raise StateError(
                f"lengths have the checksum {lengths} in the checkpoint, {self.costs.checksum} here: they are of "
                "another data set; pass batch_sampler the saved job's lengths=, or leave it out"
            )
        saved = state["regions"]
        if saved is not None and saved.get("rules") != RULES_VERSION:
            raise StateError(
                f"the regions of this epoch were cut by rules of version {saved.get('rules', 1)}, this one has "
                f"{RULES_VERSION}: samples would be lost; finish the epoch with the version that saved it"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved step, also at another world size. Raises `StateError` if the order would differ.

        torchdata's `StatefulDataLoader` calls this too, with its state from when it asked for batches ahead of the
        loop. Then the position that the controller has loaded stays. Raises `UsageError` if the controller has loaded
        none and the loader's position would deal samples again.
        """
        if not self._keeps_place(state, reader_of(self)):
            self.check_state(state)
            self.go_on(state)

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue after the saved step of a checked state."""
        saved = state["regions"]
        self._load_position(state)
        self._cuts, self._regions = [dict(cut) for cut in state["cuts"]], None
        self._order_name = state["order"]
        if saved is not None and len(saved["lengths"]) == self.world_size:
            self._regions = Regions(np.asarray(saved["sizes"]), np.asarray(saved["lengths"]), int(saved["begin"]))
        elif saved is not None:
            self._cuts.append({"lengths": list(saved["lengths"]), "taken": list(state["taken"])})
        self._order = None

    def _keeps_place(self, state: dict[str, Any], reader: BatchReader) -> bool:
        """Whether `state` is a loader's own: it says where the loader was, not where the loop must continue."""
        if reader.handed_on is None:
            return False
        if reader.resumes.get("_steps_since_snapshot"):
            fix = "write StatefulDataLoader(..., snapshot_every_n_steps=1), or leave the loader's state out"
            raise self.owner.fail(UsageError(f"a loader that skips to where it was would leave samples out: {fix}"))
        if self._issuer.loaded or self._position_state().items() <= state.items():
            return True
        if reader.ahead:
            why = "a loader's own state was saved when it had asked for batches ahead, so samples would be dealt again"
            fix = "write controller.load_state_dict(state) before the loop, with what controller.state_dict() gave"
            kept = "It holds the place in the data; the loader's may be left out"
            raise self.owner.fail(UsageError(f"{why}: {fix}. {kept}"))
        return False

    def begin_epoch(self, now: Cursor) -> None:
        super().begin_epoch(now)
        self._cuts, self._regions, self._order = [], None, None

    def read(self, piece: Piece, before: Cursor) -> list[int]:
        order, first = self._dealt(piece.plan)
        if self._regions is not None:
            first = int(self._regions.starts[self.rank] + before.taken[self.rank])
        else:
            first += piece.before
        first += piece.offset
        at = slice(first, first + piece.samples) if piece.samples else np.clip([first, first + 1], 0, order.size - 1)
        indices: list[int] = order[at].tolist()
        return indices

    def _dealt(self, plan: StepPlan) -> tuple[Order, int]:
        """Indices that hold the samples of `plan` rank by rank, and where they begin."""
        if plan.order is not None:
            return plan.order, 0
        known, epoch = self._order, plan.round.epoch
        return (known[1] if known is not None and known[0] == epoch else self._epoch_order(epoch)), plan.start

    def epoch_length(self) -> int:
        return self.dataset_size

    def plan_group(self, now: Cursor) -> Group:
        usual = self._usual
        number = now.index // self.accumulate
        same = usual is not None and usual.entries is self.allocations.entries and number in usual.rounds
        if usual is not None and same and self.dataset_size - now.position >= usual.least:
            return usual.group  # the common case
        group = self._shares(now)
        if self.costs is None:
            return group
        order, begin = self._epoch_order(now.epoch), now.position
        high, cuts = np.maximum(self.high, group.sizes), []
        for turn, shares in enumerate(group.counts, now.index):
            end = begin + int(shares.sum())
            in_pieces = self.micro_batch is not None
            cuts.append(self.costs.cut(order[begin:end], shares, self.low, high, turn=turn, in_pieces=in_pieces))
            begin = end
        return group.cut(cuts)

    def _shares(self, now: Cursor) -> Group:
        """The optimizer step that begins at `now`, by numbers of samples."""
        left = self.dataset_size - now.position
        ledger, entries, number = self.allocations, self.allocations.entries, now.index // self.accumulate
        sizes = self.sizes_at(now.index)
        if self.partition == "contiguous":
            if self._regions is None:
                _, lengths = self._whole_epoch(now.position, sizes)
                self._regions = Regions(sizes, lengths, now.position)
            sizes = self._regions.sizes
        first = now.position == 0
        counts = next_group(left, sizes, accumulate=self.accumulate, low=self.low, high=self.high, first=first)
        group = self.planned(number, counts, sizes, final=int(counts.sum()) == left)
        if self.costs is None and self._regions is None and all(group.regular) and not group.final:
            self._usual = Usual(group, entries, ledger.span(number), enough(group.total[0], self.accumulate))
        return group

    def _whole_epoch(self, position: int, sizes: Ints) -> tuple[int, Ints]:
        left = self.dataset_size - position
        return whole_epoch(left, sizes, accumulate=self.accumulate, low=self.low, high=self.high, first=position == 0)

    def _epoch_order(self, epoch: int) -> Order:
        """The indices of an epoch in order. After cuts at other world sizes, only those left by them."""
        if self._order is None or self._order[0] != epoch:
            self._require_size()
            self._order = epoch, self._draw(epoch)
        return self._order[1]

    def _require_size(self) -> None:
        now = self.dataset_size if self.size_now is None else self.size_now()
        if now != self.dataset_size:
            what = f"the data set has {now} samples, and had {self.dataset_size} when its sampler was made"
            why = "an epoch would leave samples out, or ask for some that are gone"
            fix = "make it whole before controller.batch_sampler(dataset), or begin a new job with what it has now"
            raise self.owner.fail(UsageError(f"{what}: {why}. Keep its length while the job runs: {fix}"))

    def _draw(self, epoch: int) -> Order:
        if self.selection is None:
            seed = self.seed if self.shuffle else None
            order = order_of_epoch(epoch, self.dataset_size, seed, computed=self._order_name == COMPUTED)
        else:
            drawn = torch.Generator().manual_seed(self.seed + epoch)
            order = self.selection.order(drawn, shuffle=self.shuffle)
        for cut in self._cuts:
            ends = np.cumsum(cut["lengths"])
            starts = ends - cut["lengths"] + cut["taken"]
            left = list(zip(starts, ends, strict=True))
            if self.partition == "stream":  # positions are of the whole epoch: trained samples stay, in front
                trained = [(a - t, a) for a, t in zip(starts, cut["taken"], strict=True)]
                left = [*trained, *left, (ends[-1], order.size)]
            order = Spliced(order, left)
        return order


def _require_partition(partition: str, costs: SampleCosts | None) -> None:
    if costs is not None and partition != "stream":
        fix = "leave lengths out, or use partition='stream'"
        raise ConfigError("partition", partition, "'stream' together with lengths", fix)
    if partition not in ("stream", "contiguous"):
        fix = spelling(partition, ("stream", "contiguous"))
        raise ConfigError("partition", partition, "'stream' or 'contiguous'", fix)


def _seed(seed: Any, *, shuffle: bool) -> int:
    """The seed in the form of torch's generators; without a shuffle it is not used."""
    try:
        return operator.index(0 if seed is None and not shuffle else seed)
    except TypeError:
        fix = "leave it out for 0, or give one number on all ranks"
        raise ConfigError("seed", seed, "a whole number", fix) from None
