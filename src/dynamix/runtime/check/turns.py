"""Whether a loop trains batches as the loader gave them: each in its turn, whole, and none passed over."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from dynamix.data import BatchSampler, Piece, Stream
from dynamix.runtime.check.advice import ACCUMULATE, ORDER, PASS_OVER, STEP
from dynamix.runtime.check.dealt import may_hold, samples_lost

MATCHES = 4  # passes in a row whose inputs were as long as the batch: then that is how this loop's inputs are
READ = 8  # batches that came as long as dealt, and none longer: then the first dimension of inputs counts samples


class Turns:
    """Of one loop; counters only.

    fail    raises `UsageError` with a message, on every rank
    grown   batches received when more were waiting than at the epoch's beginning, and what that may mean
    """

    def __init__(self, fail: Callable[[str], NoReturn]) -> None:
        self._fail = fail
        self.grown: tuple[int, str] | None = None
        self._iteration = -1
        self._ahead: int | None = None  # batches received and not consumed when this iteration's first forward ran
        self._forwarded = 0  # batches that had a forward pass, as far as that can be told
        self._matches, self._sizes = 0, deque[int](maxlen=8)  # samples of the last batches
        self._length: int | None = None  # of the inputs before
        self._late = False  # the inputs before were as long as the batch before theirs, where sizes had changed
        self._read = 0  # batches that came as long as dealt
        self._fits = False  # a pass of the batch in hand had its samples, once or several times
        self._odd = 0  # samples of the passes of the batch in hand that were of another number

    def pass_begins(
        self, source: BatchSampler | Stream, piece: Piece, inputs: Iterable[Any], *, again: bool, compares: bool
    ) -> bool:
        """A forward pass of `inputs` begins; False if it is none of the loop's, which has no batch.

        again      it is not the first of this batch
        compares   the lengths of inputs are to be compared with those of batches
        """
        delivered, gone = source.delivered(), source.reader_gone
        if self._iteration != source.iteration:
            self._iteration, self._ahead, self.grown = source.iteration, None, None
        ahead = delivered - source.batches_consumed
        if ahead <= 0:
            return False
        if self._ahead is None:
            self._ahead = ahead
        if ahead <= self._ahead:
            self.grown = None
        elif source.issuer == threading.get_ident() and not gone:
            self._look_at_growth(delivered, again=again)
        if not gone:
            self._forwarded = source.batches_consumed + 1
            if compares:
                self._in_turn(source, piece.samples, inputs, alone=ahead == 1)
        return True

    def _look_at_growth(self, delivered: int, *, again: bool) -> None:
        """More batches are waiting than when the epoch began. Raise if another was taken before they were stepped.

        A loop may read more at once than before. One that passed over a batch takes the next while one waits too many.
        """
        if self.grown is None:
            passed = f"a batch was taken from the loader and neither trained nor stepped: {PASS_OVER}"
            unstepped = f"a new batch, but controller.step() was not called for the one before: {STEP}; {ACCUMULATE}"
            self.grown = delivered, unstepped if again else passed
        elif delivered > self.grown[0]:
            self._fail(self.grown[1])

    def _in_turn(self, source: BatchSampler | Stream, mine: int, inputs: Iterable[Any], *, alone: bool) -> None:
        """Raise where the inputs are as long as another batch, in a loop in which they were as long as their own.

        alone   the loop has no other batch that is not stepped: then it may have dropped samples, see `require_dealt`
        """
        length = _length(inputs)
        before, self._length = self._length, length
        if not mine or length is None:
            return
        if length == mine:
            self._fits = True
            if self._late and length != before:
                self._fail(f"batches are trained one turn after their own: {ORDER}")
            self._matches, self._late = self._matches + 1, False
            return
        self._fits = self._fits or may_hold(inputs, mine)
        self._odd += length
        others = {*self._sizes, *(piece.samples for piece in source.waiting())}
        if self._matches >= MATCHES and length != before and length in others and not (self._fits or alone):
            turned = f"a batch of {length} samples was trained in the turn of one of {mine}: {ORDER}"
            self._fail(turned if self.grown is None else self.grown[1])
        self._late = self._matches >= MATCHES and bool(self._sizes) and length == before == self._sizes[-1]
        self._matches = 0

    def require_dealt(self, mine: int, loss: Any) -> None:
        """Raise if the batch in hand reached the model as fewer than the `mine` samples that were dealt."""
        if self._odd > mine:
            self._read = 0  # padded, or rows are no samples
        elif self._odd and self._read >= READ and not self._fits:
            lost = samples_lost(mine, self._odd, loss)
            if lost is not None:
                self._fail(lost)

    def piece_done(self, piece: Piece) -> None:
        """`controller.step()`: the batch in hand is done."""
        self._read += self._fits and piece.samples > 1 and not self._odd
        self._fits, self._odd = False, 0
        self._sizes.append(piece.samples)

    def all_forwarded(self, source: BatchSampler | Stream) -> bool:
        """Whether every batch of the iteration that ends had a forward pass."""
        return self._iteration == source.iteration and self._forwarded >= source.batches_issued


def _length(inputs: Iterable[Any]) -> int | None:
    """Of the first tensor's first dimension; a model may take a dict of tensors."""
    for value in inputs:
        if isinstance(value, Tensor):
            return len(value) if value.dim() else None
        if isinstance(value, Mapping) and (length := _length(value.values())) is not None:
            return length
    return None
