"""Streams: unequal batches of an iterable data set, cut in the main process."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from dynamix.data.allocations import Allocations
from dynamix.data.cutting import enough, next_group
from dynamix.data.order import OrderOptions, SampleOrder, require_equal
from dynamix.data.plan import Cursor, Group, Piece, StepPlan
from dynamix.data.source import Source
from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.window import Ints

MAX_UNCONSUMED = 1024


class Handle(Protocol):
    """An asynchronous collective under way, such as `torch.distributed.Work`."""

    def wait(self) -> Any: ...


class Stream(SampleOrder):
    """Iterable of collated batches for data sets without indices. Iterate it directly, not through a DataLoader.

    To read and decode in the background, pass a `DataLoader(dataset, batch_size=None, num_workers=n)` as `iterable`; it
    yields single samples (an IterableDataset must then split itself by `get_worker_info`, or n workers yield
    everything n times).

    sharded=False   Every rank iterates the same global stream, in the same order. Step t takes its next B_t samples and
        this rank keeps its slice. Guarantee: each sample exactly once over all ranks, in an order that does not depend
        on the split; resumes at any world size. Price: each rank reads everything, and holds 1.5 steps of all ranks.
    sharded=True    Each rank iterates its own stream (a shard). Guarantee: each sample of each stream exactly
        once; the order across ranks depends on the allocations; resumes at the same world size only.
        One optimizer step ahead, the ranks agree by an asynchronous sum (a collective) what each can give.
        A rank that ran dry gets placeholders (its last samples) until all are dry. If a rank's size more than doubles
        at once, it gives for one step what it has read ahead. The remainder of a tail stays with its rank.

    iterable      yields samples; `set_epoch`, and `state_dict` with `load_state_dict`, are used if it has them
    collate_fn    list of samples -> batch
    agree         sharded: starts an in-place sum of an int64 vector (W,) over ranks and returns a handle with `wait()`;
                  may be None at W=1
    The rest is as in `BatchSampler`. `plan`, `consume` and the states work the same. A state without the iterable's
    own is resumed by reading up to the position again. sharded: save the state of every rank.

    >>> stream = Stream(range(7), Allocations([1, 2]), rank=1, world_size=2)
    >>> for batch in stream:
    ...     print(batch.tolist(), stream.consume().counts.tolist())
    [1, 2] [1, 2]
    [4, 5, 6] [1, 3]
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        allocations: Allocations,
        *,
        sharded: bool = False,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        agree: Callable[[Tensor], Handle] | None = None,
        **shared: Unpack[OrderOptions],
    ) -> None:
        super().__init__(allocations, **shared)
        if not hasattr(iterable, "__iter__"):
            fix = "pass an IterableDataset; for a data set with indices write controller.batch_sampler(dataset)"
            raise ConfigError("iterable", iterable, "anything with __iter__", fix)
        if getattr(iterable, "batch_sampler", None) is not None:  # each of its batches would count as one sample
            fix = "write DataLoader(dataset, batch_size=None, num_workers=n); the stream makes the batches"
            raise ConfigError("iterable", "a DataLoader of batches", "one of single samples", fix)
        if sharded and agree is None and self.world_size > 1:
            raise ConfigError("agree", None, "a callback that sums over ranks", "use controller.stream(...)")
        self.sharded, self.collate_fn, self.agree = sharded, collate_fn, agree
        self._source = Source(iterable)
        self._offer: tuple[Tensor, Handle | None] | None = None
        self._resume: dict[str, Any] | None = None

    def consume(self) -> StepPlan:
        """As `SampleOrder.consume`; also drops the step's samples from memory."""
        plan = super().consume()
        self._source.drop(self._own(self.place))
        return plan

    def state_dict(self) -> dict[str, Any]:
        """The loop's place in the data; with sharded or stateful iterables it differs by rank."""
        source = self._source.state_at(self._own(self._saved)) if self._source.started else None
        return self._position_state() | {
            "sharded": self.sharded,
            "source": source if self._resume is None else self._resume,
        }

    def identity(self) -> dict[str, Any]:
        return {"sharded": self.sharded} | self._position_state()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise `StateError` for another kind of stream, or a sharded one at another W."""
        require_equal(state, sharded=self.sharded)
        if self.sharded and len(state["taken"]) != self.world_size:
            raise StateError(
                f"a sharded stream saved by {len(state['taken'])} ranks cannot go on with {self.world_size}: the "
                "shards belong to the ranks; resume with the same number of ranks, or begin anew"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved step. Raises `StateError` for another kind of stream, or another W if sharded."""
        self.check_state(state)
        self.go_on(state)

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue after the saved step of a checked state."""
        self._load_position(state)
        self._resume = state["source"]
        self._source.stop()

    def epoch_length(self) -> int | None:
        if self.sharded:
            return None
        try:
            return len(self._source.iterable)  # type: ignore[arg-type]
        except TypeError:  # it has no length, or it is a loader whose data set has none
            return None

    def _own(self, cursor: Cursor) -> int:
        """This rank's position in the stream that it reads."""
        return int(cursor.taken[self.rank]) if self.sharded else cursor.position

    def rewind(self) -> None:
        super().rewind()
        if self._offer is not None:  # a pending collective must end before it can be dropped
            self._settle()

    def begin_epoch(self, now: Cursor) -> None:
        super().begin_epoch(now)
        self._resume = None
        self._source.stop()

    def read(self, piece: Piece, before: Cursor) -> Any:
        if self.issued - self.consumed > MAX_UNCONSUMED:
            kept = f"{MAX_UNCONSUMED} batches were issued and none consumed, and their samples stay in memory"
            fix = "call controller.step() once per batch, or iterate the data set itself where you only evaluate"
            raise self.owner.fail(UsageError(f"{kept}: {fix}"))
        first = self._own(before) + piece.offset
        if not self.sharded:
            first += piece.before
        return self.collate_fn(self._source.take(first, piece.samples) if piece.samples else self._placeholder(before))

    def _placeholder(self, before: Cursor) -> list[Any]:
        at = self._own(before)
        samples = self._source.take(at, 2) or self._source.before(at)
        return (samples * 2)[:2]

    def plan_group(self, now: Cursor) -> Group | None:
        if not self._source.started:
            self._source.start(now.epoch, self._own(now), self._resume)
            self._resume = None
        sizes = self.sizes_at(now.index)
        if self.sharded:
            return self._plan_sharded(now, sizes)
        left = self._source.available(now.position, enough(int(sizes.sum()), self.accumulate))
        if left == 0:
            return None
        counts = next_group(
            left, sizes, accumulate=self.accumulate, low=self.low, high=self.high, first=now.position == 0
        )
        final = self._source.dry and int(counts.sum()) == left
        return self.planned(now.index // self.accumulate, counts, sizes, final=final)

    # ------------------------------------------------------------ sharded

    def _plan_sharded(self, now: Cursor, sizes: Ints) -> Group | None:
        if self._offer is None:
            self._post(self._own(now), now.index)
        offered = self._settle()
        held, dry = offered >> 1, (offered & 1).astype(bool)
        empty = dry & (held + now.taken == 0)
        if empty.any() and not empty.all():
            raise ConfigError(
                "samples in the stream",
                0,
                "2 or more on every rank",
                f"give rank {int(np.argmax(empty))} a part of the data",
            )
        if dry.all() and not held.any():
            return None
        counts = self._own_groups(held, dry, sizes, now.taken == 0)
        taken = counts.sum(0)
        final = bool(dry.all() and (held == taken).all())
        if not final:
            self._post(self._own(now) + int(taken[self.rank]), now.index)
        return self.planned(now.index // self.accumulate, counts, sizes, final=final)

    def _own_groups(self, held: Ints, dry: NDArray[np.bool_], sizes: Ints, first: NDArray[np.bool_]) -> Ints:
        """Counts (A, W) if every rank deals from its own stream: the rules of `next_group`, rank by rank."""
        steps = self.accumulate
        if not (sizes[held > 0] > 0).any():
            # Only ranks that the policy idles still have samples, and these must be used up too.
            sizes = np.where(held > 0, np.minimum(np.maximum(self.low, 2), self.high), sizes)
        ahead = np.maximum((held - 2 * steps) // steps, 0)
        counts = np.tile(np.minimum(sizes, ahead), (steps, 1))
        for i in np.flatnonzero(dry & (held > 0) & (sizes > 0)):
            own = slice(i, i + 1)
            counts[:, own] = next_group(
                int(held[i]), sizes[own], accumulate=steps, low=self.low[own], high=self.high[own], first=bool(first[i])
            )
        return counts

    def _post(self, position: int, index: int) -> None:
        """Offer what this rank can give to the next step. Its size is still unknown: assume up to twice this one's."""
        size = int(self.sizes_at(index)[self.rank])
        reach = max(2 * size, int(self.low[self.rank]), 2)
        ceiling = max(int(self.high[self.rank]), size)
        held = self._source.available(position, enough(min(reach, ceiling), self.accumulate))
        vector = torch.zeros(self.world_size, dtype=torch.int64)
        vector[self.rank] = 2 * held + self._source.dry
        self._offer = vector, None if self.agree is None else self.agree(vector)

    def _settle(self) -> Ints:
        assert self._offer is not None
        (vector, handle), self._offer = self._offer, None
        if handle is not None:
            handle.wait()
        return vector.numpy()
