"""What samplers and streams share: which micro-steps were issued and consumed, and what each of them does."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamix.data.allocations import Allocations
from dynamix.data.cutting import NO_LIMIT
from dynamix.data.owner import Nobody, SourceOwner
from dynamix.data.plan import Cursor, Group, Piece, StepPlan, pieces_of
from dynamix.data.reader import BatchReader, reader_of
from dynamix.errors import ConfigError, DynamixError, StateError, UsageError


class SampleOrder(ABC):
    """Issues plans ahead of the training loop and remembers which of them the loop has consumed.

    `issued` returns to `consumed` at every new iteration: batches prefetched by an abandoned iterator are lost, and
    their samples are issued again.

    current        the batch in hand: issued, not consumed, the first such; None if there is none
    issued, consumed   micro-steps so far (counters over the job)
    begun          micro-steps that were begun to be issued, the one that another thread plans just now included
    batches_issued, batches_consumed   pieces of this rank so far
    iteration      another number for every iteration, so that an abandoned iterator cannot go on
    issuer         the thread that asked for the newest batch
    micro_batch    most samples of a piece; None: a share of a micro-step is one
    apart          ranks step apart in every round; else where the allocation says so
    either         the allocation says how ranks meet: shares are cut only where they step apart
    placeholder    what the loop gets in place of a batch that is none
    owner          whom the source belongs to

    A thread that reads ahead of the loop may come to the end of an epoch, and begin the next, before the loop has
    consumed the last steps. They stay issued then, and the next epoch's follow them.
    """

    goes_on_ahead = False  # whether an epoch can be issued while the one before is not consumed

    def __init__(
        self,
        allocations: Allocations,
        *,
        rank: int,
        world_size: int,
        accumulate: int,
        low: ArrayLike,
        high: ArrayLike | None,
        micro_batch: int | None,
        apart: bool,
        either: bool,
        placeholder: Callable[[Any], Any] | None,
        owner: SourceOwner | None,
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
        self.allocations = allocations
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self.low = np.broadcast_to(np.asarray(low, dtype=np.int64), (world_size,))
        self.limit(NO_LIMIT if high is None else high)
        if (self.low > self.high).any():
            raise ConfigError("low", self.low.tolist(), f"at most high={self.high.tolist()}", "swap the bounds")
        self.micro_batch, self.apart, self.either, self.placeholder = micro_batch, apart, either, placeholder
        self.owner: SourceOwner = Nobody() if owner is None else owner
        self.issuer = 0
        self._reads: threading.Thread | None = None  # asked for the newest batch
        self._consumes = threading.current_thread()
        self._lock = threading.Lock()  # of what is pending
        self._ahead = self._behind = self._saved = Cursor(0, 0, 0, np.zeros(world_size, dtype=np.int64))
        self.issued = self.consumed = self.begun = 0
        self.current: Piece | None = None
        self._pending: deque[tuple[Piece, Cursor]] = deque()  # where the loop stands once the piece is consumed
        self.batches_issued = self.batches_consumed = self.iteration = 0
        self._reader = BatchReader()
        self._refused: UsageError | None = None
        self._began = 0  # batches consumed when the iteration under way began
        self._loaded = False
        self.draws_alike = True  # whether ranks' samples are as if drawn from the same
        self._hold = False  # a finished epoch that the user asked for by name is not run again
        self._opened = 0  # batches consumed when the epoch under way began
        self._told = set[int]()  # batches of an epoch, as somebody was told who asked at the beginning of one

    def limit(self, high: ArrayLike) -> None:
        """Let no rank have more samples of a micro-step than `high`, a number or (W,), from the next round on."""
        self.high = np.broadcast_to(np.asarray(high, dtype=np.int64), (self.world_size,))

    def limit_pieces(self, samples: int | None) -> None:
        """Cut no piece of this rank's larger; None: a share of a micro-step is one piece."""
        self.micro_batch = samples

    def delivered(self) -> int:
        """Batches that the loop has received; those issued, if nobody can tell."""
        handed_on = self._reader.handed_on
        return self.batches_issued if handed_on is None else min(self._began + handed_on, self.batches_issued)

    @property
    def reader_gone(self) -> bool:
        """Whether the loader's iterator is gone, so that `delivered()` is what it may have handed on at most."""
        return self._reader.gone

    @property
    def consumed_here(self) -> bool:
        """Whether this is the loop's thread: the one that consumed last, or made the sampler."""
        return threading.current_thread() is self._consumes

    @property
    def abandons(self) -> bool:
        """Whether a new iteration would leave an epoch half done, perhaps after another round on each rank."""
        return self.micro_batch is not None and not self._behind.finished and self.batches_consumed > self._began

    @property
    def left_early(self) -> bool:
        """Whether a new iteration would leave an epoch of which this rank has consumed a part."""
        now = self._behind
        return self.abandons or (now.position > 0 and not now.finished and self.batches_consumed > self._began)

    @property
    def exhausted(self) -> bool:
        """Whether every batch of the epoch has been issued."""
        return self._ahead.finished

    @property
    def epoch(self) -> int:
        """The epoch being consumed."""
        return self._behind.epoch

    @property
    def finished(self) -> bool:
        """Whether the epoch being consumed is done, and no other begun."""
        return self._behind.finished

    @property
    def progress(self) -> float:
        """Part of the epoch's samples that is consumed, 0 to 1, over all ranks; NaN while nobody knows its length."""
        if self._behind.finished:
            return 1.0
        length = self._epoch_length()
        return float("nan") if length is None else min(self._behind.position / max(length, 1), 1.0)

    @property
    def cut_short(self) -> int:
        """Samples that are left where the epoch has had as many batches as somebody was told it has; else 0.

        A loop that ends there does so for that number, which no longer held when sizes moved.
        """
        done, length = self.batches_consumed - self._opened, self._epoch_length()
        if self._behind.finished or length is None or done not in self._told:
            return 0
        return length - self._behind.position

    def handed_on(self) -> Piece:
        """The batch that the loop was given last."""
        return self._pending[self.delivered() - self.batches_consumed - 1][0]

    def _epoch_length(self) -> int | None:
        """Samples of an epoch over all ranks, where that is known before its end."""
        return None

    def plan(self) -> StepPlan:
        """The plan of the micro-step being consumed now: issued, not yet consumed. Raises `UsageError` if none is."""
        return self.piece().plan

    def piece(self) -> Piece:
        """The batch being consumed now: issued, not yet consumed. Raises `UsageError` if there is none."""
        if self.current is None:
            raise UsageError(
                "no batch was issued that is not consumed yet: iterate the loader (or stream) made from this "
                "controller, and call controller.step() once per batch, inside the loop. itertools.cycle(loader) and "
                "a list of batches give what was trained already: iterate the loader anew in each epoch"
            )
        return self.current

    def waiting(self) -> list[Piece]:
        """The batches that are planned and not consumed, in order."""
        return [piece for piece, _ in list(self._pending)]  # a thread that reads ahead may add to them meanwhile

    def consume(self) -> StepPlan:
        """Count the current batch as done and return its plan; only whole optimizer steps are ever saved."""
        piece = self.piece()
        self._consumes = threading.current_thread()
        with self._lock:
            _, self._behind = self._pending.popleft()
            self.current = self._pending[0][0] if self._pending else None
            self.consumed = self._behind.index
            self.batches_consumed += 1
        if piece.last:
            self._saved = self._behind
        return piece.plan

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to run next. The epoch under way keeps its position, also after a mid-epoch load.

        Another epoch starts at its beginning, and steps issued but not consumed are dropped. Naming an epoch that
        this job has finished runs it again; naming the finished epoch of a checkpoint just loaded runs nothing.
        """
        if epoch < 0:
            raise ConfigError("epoch", epoch, "0 or more", "count epochs from 0")
        now, ahead = self._behind, self._ahead
        if now.finished and ahead.epoch == epoch != now.epoch:
            return  # a thread that reads ahead has begun it
        try:
            reads_on = self._reads_on()
        except UsageError as error:
            raise self.owner.fail(error) from None
        if reads_on:
            self._issue_from(self._following(ahead, epoch))
            return
        self.owner.iteration_begins()
        self._hold = epoch == now.epoch and now.finished and self._loaded
        if epoch != now.epoch or (now.finished and not self._loaded):
            self._start_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self._behind = self._saved = self._following(self._behind, epoch)
        self._opened = self.batches_consumed
        self._rewind()

    def _following(self, now: Cursor, epoch: int) -> Cursor:
        """The beginning of `epoch`, after `now`."""
        begin = -(-now.index // self.accumulate) * self.accumulate  # an abandoned optimizer step counts as one
        return Cursor(epoch, 0, begin, np.zeros(self.world_size, dtype=np.int64))

    def _reads_on(self) -> bool:
        """Whether who begins now is ahead of the loop, which has yet to consume what this one was given.

        Raises `UsageError` where it cannot be known whether the loop is to go on with what was given, or with what will
        be.
        """
        now = threading.current_thread()
        if now is not self._reads or now is self._consumes:
            return False
        with self._lock:
            pending, consumed = list(self._pending), self.batches_consumed
        given = min(self._began + self._reader.has_handed_on, self.batches_issued)
        if given <= consumed:
            return False  # nothing that is not consumed
        chosen = pending[-1][1].finished and not self._ahead.finished
        if self.goes_on_ahead and (chosen or (self._ahead.finished and given == self.batches_issued)):
            return True
        why = "a thread that reads ahead began a new iteration while batches of the one before were not stepped"
        fix = "let it wait until the loop has called controller.step() for all of them (queue.Queue has join())"
        raise UsageError(f"{why}, so that their samples would be dealt twice: {fix}")

    def _rewind(self) -> None:
        with self._lock:
            self._pending.clear()
            self.current = None
        self.consumed = self._behind.index
        self._issue_from(self._behind)
        self.batches_issued = self.batches_consumed
        self.iteration += 1

    def _issue_from(self, now: Cursor) -> None:
        self._ahead = now
        self.issued = self.begun = now.index

    def _begin(self) -> int:
        """A new iteration begins: go on where consumption stands, or with the next epoch. Returns its number."""
        self._refused = None
        try:
            reader = reader_of(self)
        except UsageError as error:  # raised with the first batch: a loader that is half made could not be cleaned up
            self._refused, reader = error, BatchReader()
        try:
            reads_on = self._reads_on()
        except UsageError as error:  # what the loop was given stays issued until it is told
            self._refused, self.iteration = error, self.iteration + 1
            return self.iteration
        if reads_on:
            if self._ahead.finished:
                self._issue_from(self._following(self._ahead, self._ahead.epoch + 1))
            self._reader, self._began, self.iteration = reader, self.batches_issued, self.iteration + 1
            return self.iteration
        self.owner.iteration_begins()
        if self._behind.finished and not self._hold:
            self._start_epoch(self._behind.epoch + 1)
        else:
            self._rewind()
        self._reader, self._began = reader, self.batches_consumed
        return self.iteration

    def _pieces(self, number: int) -> Iterator[tuple[Piece, Cursor]]:
        """What this rank is to load, batch after batch until the epoch ends, and where its micro-step begins."""
        while True:
            before = self._ahead
            if (plan := self._issue(number)) is None:
                return
            for piece in self._cut(plan, before):
                if number != self.iteration:
                    raise self._abandoned()
                self.batches_issued += 1
                yield piece, before

    def _cut(self, plan: StepPlan, before: Cursor) -> list[Piece]:
        """This rank's pieces of a micro-step that began at `before`. They are pending from now on."""
        mine = int(plan.counts[self.rank])
        if self.micro_batch is None or (most := self.most_of_piece(plan.piece)) is None:
            group, micro = plan.group[:, self.rank], plan.micro
            following = int(group[micro + 1]) if micro + 1 < self.accumulate else 0
            share = mine if self.accumulate == 1 else int(group.sum())
            last = micro + 1 == self.accumulate
            pieces = [Piece(plan, micro, self.accumulate, last, mine, 0, following, share, by_size=False)]
        else:
            sizes = pieces_of(mine, most)
            ends = np.cumsum(sizes).tolist()
            then = zip(sizes, ends, [*sizes[1:], 0], strict=True)
            pieces = [
                Piece(plan, k, len(sizes), k + 1 == len(sizes), n, end - n, more, mine, by_size=True)
                for k, (n, end, more) in enumerate(then)
            ]
        with self._lock:
            for piece in pieces[:-1]:
                self._pending.append((piece, before))  # a round of which not all is consumed is not begun
            self._pending.append((pieces[-1], self._ahead))
            self.current = self._pending[0][0]
        return pieces

    def most_of_piece(self, apart: int) -> int | None:
        """Most samples of this rank's pieces where the allocation says `apart` of a step; None: its share is one."""
        if self.micro_batch is None or not apart:
            return None if self.either else self.micro_batch
        return min(apart, self.micro_batch)

    def _abandoned(self) -> DynamixError:
        left = "this iterator was abandoned: a newer one was made, a state was loaded, or set_epoch was called"
        why = "its samples were issued again, so going on would repeat them; iterate the newest one"
        return self.owner.fail(UsageError(f"{left}; {why}"))

    def _issue(self, number: int) -> StepPlan | None:
        """The next micro-step, or None at the end of the epoch."""
        if number != self.iteration:
            raise self._abandoned()
        if self._loaded:
            self._loaded = False
            self.owner.resumed()
        if self._refused is not None:
            raise self.owner.fail(self._refused)
        self.issuer, self._reads = threading.get_ident(), threading.current_thread()
        now = self._ahead
        if now.finished:
            # One that goes on from the end of an epoch begins twice, and has asked here for batches ahead.
            self._hold = self._hold and bool(self._reader.resumes.get("_iterator_finished"))
            return None
        group = now.group
        if group is None:
            owner, rounds = self.owner, now.index // self.accumulate
            while True:
                with owner.lock:
                    if rounds < owner.horizon:
                        self.begun = now.index + 1
                        break
                owner.settle()
            group = self._plan_group(now)
            if group is None:
                self._behind = self._saved = replace(now, finished=True)
                self.consumed = now.index
                self._issue_from(self._behind)
                return None
        counts = group.counts[now.micro]
        done = now.micro == self.accumulate - 1
        plan = StepPlan(
            index=now.index,
            epoch=now.epoch,
            start=now.position,
            counts=counts,
            group=group.counts,
            micro=now.micro,
            regular=group.regular[now.micro],
            samples=group.samples,
            first=now.position == (sum(group.total[: now.micro]) if now.micro else 0),
            last=done and group.final,
            apart=self.apart or group.piece > 0,
            piece=group.piece,
            work=group.work,
            order=None if group.cuts is None else group.cuts[now.micro].samples,
        )
        self._ahead = Cursor(
            epoch=now.epoch,
            position=now.position + group.total[now.micro],
            index=now.index + 1,
            taken=now.taken + counts,
            group=None if done else group,
            micro=0 if done else now.micro + 1,
            finished=plan.last,
        )
        self.issued = self.begun = now.index + 1
        return plan

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What must be alike on all ranks: which samples, in which order, and how far. Plain values by name."""

    @abstractmethod
    def _plan_group(self, now: Cursor) -> Group | None:
        """Plan the optimizer step that begins at `now`; None when the epoch turns out to be empty."""

    def _position_state(self, now: Cursor | None = None) -> dict[str, Any]:
        """The last finished optimizer step: gradients accumulated for an unfinished one are not saved, so its
        samples are dealt again after a resume."""
        now = now or self._saved
        return {
            "epoch": now.epoch,
            "position": now.position,
            "consumed": now.index,
            "finished": now.finished,
            "taken": now.taken.tolist(),
        }

    def _load_position(self, state: dict[str, Any]) -> None:
        """`taken` is kept at the same world size; at another the caller has folded it into something else."""
        taken = np.asarray(state["taken"], dtype=np.int64)
        if taken.size != self.world_size:
            taken = np.zeros(self.world_size, dtype=np.int64)
        self._behind = self._saved = Cursor(
            int(state["epoch"]), int(state["position"]), int(state["consumed"]), taken, finished=bool(state["finished"])
        )
        self._rewind()
        self._loaded, self._hold = True, False


def require_equal(state: dict[str, Any], **mine: object) -> None:
    """Raise `StateError` naming the first value of a checkpoint that differs from this job's."""
    for name, value in mine.items():
        if state.get(name) != value:
            raise StateError(
                f"{name}={state.get(name)!r} in the checkpoint, {name}={value!r} here: the order of samples would "
                f"differ; construct the sampler or stream with {name}={state.get(name)!r}"
            )
