"""The base of samplers and streams: how batches are requested, and facts about the epoch."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Required, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from dynamix.data.allocations import Allocations
from dynamix.data.computed_order import COMPUTED
from dynamix.data.cutting import NO_LIMIT
from dynamix.data.issuing import Asking, Issuable, Issuer
from dynamix.data.owner import Nobody, SourceOwner
from dynamix.data.plan import Cursor, Group, Piece
from dynamix.errors import ConfigError, StateError
from dynamix.window import Ints


class OrderOptions(TypedDict, total=False):
    """Options that every source of batches takes by name; `SampleOrder` explains each."""

    rank: Required[int]
    world_size: Required[int]
    accumulate: int
    low: ArrayLike
    high: ArrayLike | None
    micro_batch: int | None
    placeholder: Callable[[Any], Any] | None
    owner: SourceOwner | None


class SampleOrder(Issuable):
    """Batches of this rank, epoch after epoch. Subclasses plan rounds and read samples.

    allocations    the ledger that all ranks share; of rounds, which are `accumulate` micro-steps each
    low, high      (W,) bounds per micro-step
    micro_batch    most samples of a piece; None: a share of a micro-step is one piece
    placeholder    the loop gets this instead of an empty batch
    owner          the job that the source belongs to
    draws_alike    whether all ranks' samples are as if drawn from the same distribution
    goes_on_ahead  whether an epoch can be issued before the previous one is consumed
    """

    def __init__(
        self,
        allocations: Allocations,
        *,
        rank: int,
        world_size: int,
        accumulate: int = 1,
        low: ArrayLike = 1,
        high: ArrayLike | None = None,
        micro_batch: int | None = None,
        placeholder: Callable[[Any], Any] | None = None,
        owner: SourceOwner | None = None,
        draws_alike: bool = True,
        goes_on_ahead: bool = False,
    ) -> None:
        if world_size < 1:
            raise ConfigError("world_size", world_size, "1 or more", "pass dist.get_world_size()")
        if not 0 <= rank < world_size:
            raise ConfigError("rank", rank, f"0 to {world_size - 1}", "pass dist.get_rank()")
        if accumulate < 1:
            raise ConfigError("accumulate", accumulate, "1 or more", "use 1 for no gradient accumulation")
        if allocations.workers != world_size:
            given, allowed = f"{allocations.workers} sizes", f"{world_size} sizes"
            raise ConfigError("allocations", given, allowed, "pass one batch size per rank")
        super().__init__(world_size)
        self.allocations = allocations
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self.low = np.broadcast_to(np.asarray(low, dtype=np.int64), (world_size,))
        self.limit(NO_LIMIT if high is None else high)
        if (self.low > self.high).any():
            raise ConfigError("low", self.low.tolist(), f"at most high={self.high.tolist()}", "swap the bounds")
        self.micro_batch, self.placeholder = micro_batch, placeholder
        self.owner: SourceOwner = Nobody() if owner is None else owner
        self._meeting = self.owner.meeting
        self.draws_alike, self.goes_on_ahead = draws_alike, goes_on_ahead
        self._told = set[int]()  # numbers of batches that `len()` returned at the start of the epoch
        self._issuer = Issuer(self)
        self.received = self._issuer.received

    def __iter__(self) -> Iterator[Any]:
        number = self._issuer.begin()
        return Asking(self._issuer.batches(number), self._issuer.reader)

    def limit(self, high: ArrayLike) -> None:
        """From the next round on, limit every rank's samples of a micro-step to `high`, a number or (W,)."""
        self.high = np.broadcast_to(np.asarray(high, dtype=np.int64), (self.world_size,))

    def limit_pieces(self, samples: int | None) -> None:
        """Limit the size of this rank's pieces; None: a share of a micro-step is one piece."""
        self.micro_batch = samples

    def most_of_piece(self, piece: int) -> int | None:
        return None if self.micro_batch is None else self._meeting.most(piece, self.micro_batch)

    def planned(self, number: int, counts: Ints, sizes: Ints, *, final: bool) -> Group:
        """Round `number` with shares `counts`, dealt in order."""
        apart, piece = self._meeting.local(self.allocations.piece_at(number))
        return Group.of(counts, sizes, apart=apart, piece=piece, final=final)

    def sizes_at(self, index: int) -> Ints:
        """Samples of each rank (W,) in micro-step `index`, by the ledger."""
        sizes, steps = self.allocations.at(index // self.accumulate), self.accumulate
        if steps > 1 and (sizes % steps).any():
            fix = "a round has that many micro-batches, all of one size"
            raise ConfigError("sizes", sizes.tolist(), f"multiples of accumulate={steps}", fix)
        return sizes if steps == 1 else sizes // steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to run next. The current epoch keeps its position, even after a mid-epoch load.

        Another epoch starts at its beginning, and steps issued but not consumed are dropped. If this job has finished
        the named epoch, it runs again. If a checkpoint just loaded had finished it, nothing runs.
        """
        if epoch < 0:
            raise ConfigError("epoch", epoch, "0 or more", "count epochs from 0")
        self._issuer.set_epoch(epoch)

    # ------------------------------------------------------------ queries of the loop's checks

    def handed_on(self) -> Piece:
        """The batch that the loop was given last."""
        return self._pending[self.received()[0] - self.batches_consumed - 1][0]

    @property
    def issuer(self) -> int | None:
        """The thread that asked for the newest batch."""
        return None if self._issuer.thread is None else self._issuer.thread.ident

    @property
    def begun(self) -> int:
        """Rounds begun so far, including one that another thread is planning."""
        return self._issuer.begun

    @property
    def rounds(self) -> int:
        """Rounds consumed so far (a counter over the job)."""
        return self.consumed // self.accumulate

    @property
    def exhausted(self) -> bool:
        """Whether every batch of the epoch has been issued."""
        return self._issuer.ahead.finished

    @property
    def abandons(self) -> bool:
        """Whether a new iteration would abandon this epoch, possibly at different rounds on different ranks."""
        here = self.batches_consumed > self._issuer.began
        return self.micro_batch is not None and not self.place.finished and here

    @property
    def left_early(self) -> bool:
        """Whether a new iteration would abandon an epoch that this rank has partly consumed."""
        now, here = self.place, self.batches_consumed > self._issuer.began
        return self.abandons or (now.position > 0 and not now.finished and here)

    @property
    def progress(self) -> float:
        """Part of the epoch's samples consumed, 0 to 1, over all ranks; NaN while its length is unknown."""
        if self.place.finished:
            return 1.0
        length = self.epoch_length()
        return float("nan") if length is None else min(self.place.position / max(length, 1), 1.0)

    @property
    def cut_short(self) -> int:
        """Samples left if the loop has had as many batches as `len()` announced for the epoch; else 0.

        A loop that stops there relies on that number, which no longer held after sizes changed.
        """
        done, length = self.batches_consumed - self.opened, self.epoch_length()
        if self.place.finished or length is None or done not in self._told:
            return 0
        return length - self.place.position

    # ------------------------------------------------------------ facts about the source

    def epoch_length(self) -> int | None:
        """Samples of an epoch over all ranks; None if unknown before its end."""
        return None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Facts that must be equal on all ranks: which samples, in which order, and how far. Plain values by name."""

    def _position_state(self) -> dict[str, Any]:
        """The state after the last finished optimizer step. Gradients of an unfinished step are not saved, so its
        samples are dealt again after a resume."""
        now = self._saved
        return {
            "epoch": now.epoch,
            "position": now.position,
            "consumed": now.index,
            "finished": now.finished,
            "taken": now.taken.tolist(),
        }

    def _load_position(self, state: dict[str, Any]) -> None:
        """Keeps `taken` at the same world size. At another, the caller has converted it to something else."""
        taken = np.asarray(state["taken"], dtype=np.int64)
        if taken.size != self.world_size:
            taken = np.zeros(self.world_size, dtype=np.int64)
        self._issuer.load(
            Cursor(
                int(state["epoch"]),
                int(state["position"]),
                int(state["consumed"]),
                taken,
                finished=bool(state["finished"]),
            )
        )


def require_known(name: str) -> None:
    """Raise `StateError` if a state names an order that this version does not know."""
    if name not in ("", COMPUTED):
        raise StateError(f"no known order is called {name!r}: go on with the version of dynamix that saved it")


def require_equal(state: dict[str, Any], **mine: object) -> None:
    """Raise `StateError` naming the first value of a checkpoint that differs from this job's."""
    for name, value in mine.items():
        if state.get(name) != value:
            raise StateError(
                f"{name}={state.get(name)!r} in the checkpoint, {name}={value!r} here: the order of samples would "
                "differ; make the data and the sampler or stream as the saved job did"
            )
