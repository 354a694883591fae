"""Issues an epoch's rounds to the loop, and counts what the loop has consumed of them."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from dynamix.data.owner import SourceOwner
from dynamix.data.plan import Cursor, Group, Piece, Round, StepPlan, pieces_of
from dynamix.data.reader import BatchReader, reader_of
from dynamix.errors import DynamixError, UsageError
from dynamix.window import Ints

Batch = TypeVar("Batch")


class Consumption:
    """The loop's place in the data on one rank, and the batches that it has yet to consume.

    `issued` returns to `consumed` when an iteration starts anew: batches that an abandoned iterator prefetched are
    lost, and their samples are issued again.

    current        the first batch that is issued but not consumed; None if there is none
    issued, consumed   micro-steps so far (counters over the job)
    batches_issued, batches_consumed   pieces of this rank so far
    iteration      a new number for every iteration, so that an abandoned iterator cannot continue
    place          the loop's position; moved by consumption and by the start of an epoch
    opened         batches consumed when the current epoch began

    A thread other than the loop's may add batches.
    """

    def __init__(self, workers: int) -> None:
        self.place = self._saved = Cursor(0, 0, 0, np.zeros(workers, dtype=np.int64))
        self.current: Piece | None = None
        self.issued = self.consumed = self.batches_issued = self.batches_consumed = self.iteration = self.opened = 0
        self._pending: deque[tuple[Piece, Cursor]] = deque()  # with the loop's position after the piece
        self._lock = threading.Lock()  # protects `_pending`
        self._thread = threading.current_thread()  # that consumed last, or made this object

    @property
    def consumed_here(self) -> bool:
        """Whether this is the loop's thread: the one that consumed last, or made the sampler."""
        return threading.current_thread() is self._thread

    @property
    def epoch(self) -> int:
        """The epoch being consumed."""
        return self.place.epoch

    @property
    def finished(self) -> bool:
        """Whether the epoch being consumed is done, and the next has not begun."""
        return self.place.finished

    def plan(self) -> StepPlan:
        """The plan of the micro-step being consumed: issued, not yet consumed. Raises `UsageError` if there is none."""
        return self.piece().plan

    def piece(self) -> Piece:
        """The batch being consumed: issued, not yet consumed. Raises `UsageError` if there is none."""
        if self.current is None:
            raise UsageError(
                "no batch is waiting to be trained: iterate the loader (or stream) that you made from this "
                "controller, and call controller.step() once per batch, inside the loop. itertools.cycle(loader) and "
                "a list of batches repeat old batches: iterate the loader again in each epoch"
            )
        return self.current

    def waiting(self) -> list[Piece]:
        """The batches that are planned but not consumed, in order."""
        return [piece for piece, _ in list(self._pending)]  # a thread that reads ahead may add to them meanwhile

    def consume(self) -> StepPlan:
        """Count the current batch as consumed and return its plan; only whole optimizer steps are ever saved."""
        piece = self.current or self.piece()
        self._thread = threading.current_thread()
        with self._lock:
            _, self.place = self._pending.popleft()
            self.current = self._pending[0][0] if self._pending else None
            self.consumed = self.place.index
            self.batches_consumed += 1
        if piece.last:
            self._saved = self.place
        return piece.plan

    # ------------------------------------------------------------ called by the issuer

    def add(self, pieces: list[Piece], before: Cursor, after: Cursor) -> None:
        """Queue this rank's pieces of a micro-step from `before` to `after`; the first is handed out at once."""
        with self._lock:
            for piece in pieces[:-1]:
                self._pending.append((piece, before))  # until a round is wholly consumed, the saved place is before it
            self._pending.append((pieces[-1], after))
            self.current, self.issued = self._pending[0][0], after.index
            self.batches_issued += 1

    def hand_out(self) -> None:
        """Count the next of the queued pieces as handed out."""
        self.batches_issued += 1

    def newest(self) -> tuple[int, Cursor]:
        """Batches consumed, and the loop's position after all queued ones."""
        with self._lock:
            return self.batches_consumed, self._pending[-1][1] if self._pending else self.place

    def iterate_on(self) -> None:
        """Start another iteration, whose batches follow the queued ones."""
        self.iteration += 1

    def rewind(self) -> None:
        """Drop the queued batches: they are issued again."""
        with self._lock:
            self._pending.clear()
            self.current = None
        self.issued = self.consumed = self.place.index
        self.batches_issued = self.batches_consumed
        self.iteration += 1

    def move_to(self, now: Cursor) -> None:
        """Continue at `now` and drop the queued batches."""
        self.place = self._saved = now
        self.rewind()

    def begin_epoch(self, now: Cursor) -> None:
        """Start an epoch at `now`."""
        self.opened = self.batches_consumed
        self.move_to(now)

    def end_epoch(self, now: Cursor) -> None:
        """End the epoch at `now`: it turned out to have no more samples."""
        self.place = self._saved = now
        self.issued = self.consumed = now.index


class Issuable(Consumption, ABC):
    """A source for an `Issuer`. Subclasses plan its rounds and read a piece's samples."""

    rank: int
    accumulate: int
    micro_batch: int | None
    goes_on_ahead: bool
    owner: SourceOwner

    @abstractmethod
    def plan_group(self, now: Cursor) -> Group | None:
        """The optimizer step that begins at `now`; None if the epoch turns out to be empty."""

    @abstractmethod
    def most_of_piece(self, piece: int) -> int | None:
        """Most samples of this rank's pieces in a round with the ledger's `piece`; None: its share is one piece."""

    @abstractmethod
    def read(self, piece: Piece, before: Cursor) -> Any:
        """The batch of a piece in the micro-step that begins at `before`."""


class Issuer:
    """Plans round after round ahead of the loop, and cuts this rank's share of each into pieces.

    begun      rounds begun so far, including one that another thread is planning
    ahead      where the next micro-step begins
    thread     the thread that asked for the newest batch
    reader     the iterator that reads
    began      batches issued when the current iteration began

    A thread that reads ahead may reach the end of an epoch and begin the next before the loop has consumed the last
    steps. These steps then stay issued, and those of the next epoch follow.
    """

    def __init__(self, of: "Issuable") -> None:
        self._of = of
        self.ahead, self.begun, self.began = of.place, 0, 0
        self.thread: threading.Thread | None = None
        self.reader = BatchReader()
        self.loaded = False  # a state was loaded, and no batch was asked for since
        self._refused: UsageError | None = None
        self._dealt: tuple[Ints | None, list[tuple[int, int]]] = None, []
        self._hold = False  # whether a finished epoch that the user named in `set_epoch` must not run again

    def load(self, now: Cursor) -> None:
        """Continue at `now`, from a loaded state."""
        self._of.move_to(now)
        self._go_back()
        self.loaded, self._hold = True, False

    def set_epoch(self, epoch: int) -> None:
        """As `Issuable.set_epoch`."""
        now = self._of.place
        if now.finished and self.ahead.epoch == epoch != now.epoch:
            return  # a thread that reads ahead has already begun it
        try:
            reads_on = self._reads_on()
        except UsageError as error:
            raise self._of.owner.fail(error) from None
        if reads_on:
            self.ahead = self._following(self.ahead, epoch)
            return
        self._of.owner.iteration_begins()
        self._hold = epoch == now.epoch and now.finished and self.loaded
        if epoch != now.epoch or (now.finished and not self.loaded):
            self._begin_epoch(epoch)

    def received(self) -> tuple[int, bool]:
        """Batches that the loop has received, and whether that is certain. It is not if the loader's iterator is gone.

        If the number is unknown, it is that of the batches issued.
        """
        reader, issued = self.reader, self._of.batches_issued
        if (iterator := reader.iterator() if reader.known else None) is None:
            return issued, not reader.known
        return min(self.began + int(iterator._num_yielded) - reader.before, issued), True

    def begin(self) -> int:
        """Start an iteration where consumption stands, or with the next epoch. Returns its number."""
        of, self._refused = self._of, None
        try:
            reader = reader_of(of)
        except UsageError as error:  # raised with the first batch, because a half-made loader cannot be cleaned up
            self._refused, reader = error, BatchReader()
        try:
            reads_on = self._reads_on()
        except UsageError as error:  # until it is raised, the batches that the loop was given stay issued
            self._refused = error
            of.iterate_on()
            return of.iteration
        if reads_on:
            of.iterate_on()
            if self.ahead.finished:
                self.ahead = self._following(self.ahead, self.ahead.epoch + 1)
        else:
            of.owner.iteration_begins()
            if of.place.finished and not self._hold:
                self._begin_epoch(of.place.epoch + 1)
            else:
                of.rewind()
                self._go_back()
        self.reader, self.began = reader, of.batches_issued
        return of.iteration

    def _begin_epoch(self, epoch: int) -> None:
        self._of.begin_epoch(self._following(self._of.place, epoch))
        self._go_back()

    def _go_back(self) -> None:
        self.ahead = self._of.place
        self.begun = -(-self.ahead.index // self._of.accumulate)

    def _following(self, now: Cursor, epoch: int) -> Cursor:
        """The start of `epoch`, after `now`."""
        begin = -(-now.index // self._of.accumulate) * self._of.accumulate  # an abandoned optimizer step counts as one
        return Cursor(epoch, 0, begin, np.zeros_like(now.taken))

    def _reads_on(self) -> bool:
        """Whether this iteration reads ahead of a loop that has not yet consumed what the thread handed on before.

        Raises `UsageError` if it is unclear whether the loop will continue with the batches handed on, or with those
        of this iteration.
        """
        if threading.current_thread() is not self.thread or self._of.consumed_here:
            return False
        consumed, newest = self._of.newest()
        given = min(self.began + self.reader.has_handed_on, self._of.batches_issued)
        if given <= consumed:
            return False  # everything handed on is consumed
        chosen = newest.finished and not self.ahead.finished
        if self._of.goes_on_ahead and (chosen or (self.ahead.finished and given == self._of.batches_issued)):
            return True
        why = "a thread that reads ahead began a new iteration before controller.step() was called for all batches"
        fix = "let it wait until the loop has called controller.step() for the last one (queue.Queue has join())"
        raise UsageError(f"{why}, so samples would be trained twice: {fix}")

    def batches(self, number: int) -> Iterator[Any]:
        """The batches that this rank loads in iteration `number`, until the epoch ends."""
        while True:
            before = self.ahead
            if (plan := self._issue(number)) is None:
                return
            pieces = self._cut(plan)
            self._of.add(pieces, before, self.ahead)
            for piece in pieces:
                if number != self._of.iteration:
                    raise self._abandoned()
                if piece is not pieces[0]:
                    self._of.hand_out()
                yield self._of.read(piece, before)

    def _abandoned(self) -> DynamixError:
        left = "this iterator is out of date: a newer one was made, a state was loaded, or set_epoch was called"
        why = "it would repeat samples that the newer one gives, so iterate the newest iterator"
        return self._of.owner.fail(UsageError(f"{left}; {why}"))

    def _issue(self, number: int) -> StepPlan | None:
        """The next micro-step, or None at the end of the epoch."""
        if number != self._of.iteration:
            raise self._abandoned()
        owner = self._of.owner
        if self.loaded:
            self.loaded = False
            owner.resumed()
        if self._refused is not None:
            raise owner.fail(self._refused)
        self.thread = threading.current_thread()
        now = self.ahead
        if now.finished:
            # A loader that resumes at the end of an epoch begins twice, and has asked for batches ahead here.
            self._hold = self._hold and bool(self.reader.resumes.get("_iterator_finished"))
            return None
        if (group := now.group) is not None and now.round is not None:
            return self._next_of(now, group, now.round)
        number = now.index // self._of.accumulate
        while True:
            with owner.lock:
                if number < owner.horizon:
                    self.begun = number + 1
                    break
            owner.settle()
        if (group := self._of.plan_group(now)) is None:
            self._of.end_epoch(now._replace(finished=True))
            self._go_back()
            return None
        return self._next_of(now, group, self._round_of(now, group))

    def _round_of(self, now: Cursor, group: Group) -> Round:
        """The round of `group`, which begins at `now`."""
        return Round(
            now.index // self._of.accumulate,
            now.epoch,
            now.position,
            group.counts,
            group.samples,
            group.regular[-1],
            now.position == 0,
            group.final,
            group.apart,
            group.piece,
            group.work,
        )

    def _next_of(self, now: Cursor, group: Group, begun: Round) -> StepPlan:
        """The micro-step at `now` of the round `begun`; moves `ahead` to the one after it."""
        micro, steps = now.micro, self._of.accumulate
        counts, done = group.counts[micro], micro == steps - 1
        order = None if group.cuts is None else group.cuts[micro].samples
        plan = StepPlan(begun, micro, now.position, counts, group.regular[micro], done and group.final, order)
        position, index, taken = now.position + group.total[micro], now.index + 1, now.taken + counts
        if done:
            self.ahead = Cursor(now.epoch, position, index, taken, finished=group.final)
        else:
            self.ahead = Cursor(now.epoch, position, index, taken, group, begun, micro + 1)
        return plan

    def _dealt_by(self, counts: Ints) -> list[tuple[int, int]]:
        """For each micro-step of a round: this rank's samples, and those of the ranks before it."""
        known, dealt = self._dealt
        if known is not counts:
            rank = self._of.rank
            dealt = list(zip(counts[:, rank].tolist(), counts[:, :rank].sum(1).tolist(), strict=True))
            self._dealt = counts, dealt
        return dealt

    def _cut(self, plan: StepPlan) -> list[Piece]:
        """This rank's pieces of a micro-step."""
        begun, micro, dealt = plan.round, plan.micro, self._dealt_by(plan.round.counts)
        mine, before = dealt[micro]
        if self._of.micro_batch is None or (most := self._of.most_of_piece(begun.piece)) is None:
            steps, last = len(dealt), micro + 1 == len(dealt)
            following, share = 0 if last else dealt[micro + 1][0], mine if steps == 1 else sum(n for n, _ in dealt)
            return [Piece(begun, plan, micro, steps, last, mine, before, 0, following, share, by_size=False)]
        sizes = pieces_of(mine, most)
        ends = np.cumsum(sizes).tolist()
        return [
            Piece(begun, plan, k, len(sizes), k + 1 == len(sizes), n, before, end - n, more, mine, by_size=True)
            for k, (n, end, more) in enumerate(zip(sizes, ends, [*sizes[1:], 0], strict=True))
        ]


class Asking(Iterator[Batch], Generic[Batch]):
    """An iteration over a sampler; its `reader` counts the batches asked for."""

    def __init__(self, batches: Iterator[Batch], reader: BatchReader) -> None:
        self._batches, self._reader = batches, reader

    def __next__(self) -> Batch:
        if not self._reader.asked:
            self._reader.begin()
        self._reader.asked += 1
        return next(self._batches)
