"""Checks the training loop against the plan: every batch forwarded, reduced once and stepped, in order.

It uses counters and flags only. A check never communicates, and reads the device only if something is wrong already. An
error goes through `fail`, which informs the other ranks.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.data import BatchSampler, Piece, Stream
from dynamix.errors import UsageError
from dynamix.runtime.check.advice import ACCUMULATE, ORDER, PASS_OVER, REPEATED, SHORT, STEP, WRAP_ONCE
from dynamix.runtime.check.dealt import may_hold, samples_lost
from dynamix.runtime.check.model import Loop, ModelCheck
from dynamix.runtime.check.unwatched_optimizers import Strangers
from dynamix.runtime.facts.beside import Beside, Told
from dynamix.runtime.part import Observation, Part
from dynamix.runtime.sync.shards import Shards

MATCHES = 4  # passes in a row with inputs as long as the batch: from then on this is expected of the loop
READ = 8  # complete batches, with none longer: from then on the first dimension counts samples


class Turns:
    """Checks that one loop's batches come in order and complete; counters only.

    grown   batches received when more waited than at the epoch's beginning, and the likely reason
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._beside = loop, Beside()
        self.grown: tuple[int, str] | None = None
        self._iteration = -1
        self._ahead: int | None = None  # batches received but not consumed at this iteration's first forward pass
        self._forwarded = 0  # batches that had a forward pass; counted only if `received()` is certain
        self._matches, self._sizes = 0, deque[int](maxlen=8)  # samples of the last batches
        self._length: int | None = None  # of the previous inputs
        self._late = False  # sizes had changed, and the previous inputs were as long as the batch before theirs
        self._read = 0  # complete batches seen
        self._fits = False  # a pass of the current batch had its number of samples, or a multiple
        self._odd = 0  # samples in passes of the current batch whose length is not the batch's
        self._folded = False  # in one of these another dimension had the batch's length

    def pass_begins(self, source: BatchSampler | Stream, piece: Piece, inputs: tuple[Any, ...]) -> bool:
        """A forward pass of `inputs` begins. Returns False if the loop holds no batch: the pass is not the loop's."""
        delivered, certain = source.received()
        if self._iteration != source.iteration:
            self._iteration, self._ahead, self.grown = source.iteration, None, None
        ahead = delivered - source.batches_consumed
        if ahead <= 0:
            return False
        if self._ahead is None:
            self._ahead = ahead
        if ahead <= self._ahead:
            self.grown = None
        elif source.issuer == threading.get_ident() and certain:
            self._look_at_growth(delivered)
        if certain:
            self._forwarded = source.batches_consumed + 1
            if len(self._loop.models) == 1 and self._loop.workers > 1:
                self._in_turn(source, piece.samples, inputs, alone=ahead == 1)
        return True

    def _look_at_growth(self, delivered: int) -> None:
        """More batches wait than when the epoch began. Raise if the loop takes another before it has stepped them.

        A loop may start to read further ahead. A loop that skipped a batch takes the next one while one too many waits.
        """
        if self.grown is None:
            passed = f"a batch of the loader was not trained, nor was controller.step() called for it: {PASS_OVER}"
            unstepped = f"a new batch, but controller.step() was not called for the one before: {STEP}; {ACCUMULATE}"
            self.grown = delivered, unstepped if self._loop.forwards else passed
        elif delivered > self.grown[0]:
            self._loop.fail(self.grown[1])

    def _in_turn(self, source: BatchSampler | Stream, mine: int, inputs: tuple[Any, ...], *, alone: bool) -> None:
        """Raise if the inputs are as long as another batch, in a loop whose inputs were as long as their own batch.

        alone   the loop holds no other unstepped batch: then it may have dropped samples, see `piece_done`
        """
        length = _length(inputs)
        before, self._length = self._length, length
        if not mine or length is None:
            return
        if length == mine:
            self._fits = True
            if length == self._beside.count:
                self._beside.may_be_others(length, inputs, self._loop.backwards())
            elif self._odd:
                self._beside.next_pass(self._loop.backwards())
            if self._late and length != before and not self._odd:
                self._loop.fail(f"the loop trains each batch one step too late: {ORDER}")
            self._matches, self._late = self._matches + 1, False
            return
        self._beside.may_be_others(length, inputs, self._loop.backwards())
        self._folded = self._folded or may_hold(inputs, mine)
        self._odd += length
        others = {*self._sizes, *(piece.samples for piece in source.waiting())}
        alone = alone or self._fits or self._folded
        if self._matches >= MATCHES and length != before and length in others and not alone:
            turned = f"the next batch has {mine} samples, but the loop trained one of {length}: {ORDER}"
            self._loop.fail(turned if self.grown is None else self.grown[1])
        self._late = self._matches >= MATCHES and bool(self._sizes) and length == before == self._sizes[-1]
        self._matches = 0

    def piece_done(self, piece: Piece, loss: Any, *, counted: bool) -> Told | None:
        """`controller.step()`: the current batch is done. Raise if the model got fewer of its samples than were dealt.

        Returns figures of samples trained in addition to the batch's, to report; None if nothing is wrong.

        counted   the loop has said what the batch's loss is over, or that it carries its weight
        """
        mine, odd, told = piece.samples, self._odd, None
        if self._beside.seen:
            told = self._beside.piece_done(piece, loss, self._loop.backwards(), fits=self._fits)
            told = None if counted or self._folded or piece.round.apart else told
        self._fits = self._fits or self._folded
        if odd > mine and not counted:
            self._read = 0  # padded, or rows are not samples
        elif odd and not (counted or self._fits) and self._read >= READ and (lost := samples_lost(mine, odd, loss)):
            self._loop.fail(lost)
        self._read += self._fits and mine > 1 and not odd
        self._fits, self._folded, self._odd = False, False, 0
        self._sizes.append(mine)
        return told

    def all_forwarded(self, source: BatchSampler | Stream) -> bool:
        """Whether every batch of the iteration that ends had a forward pass."""
        return self._iteration == source.iteration and self._forwarded >= source.batches_issued


@dataclass(eq=False)
class LoopCheck(Loop, Part):
    """Records what the loop has done since the last `step()`, and checks it."""

    def __post_init__(self) -> None:
        self._checks: list[ModelCheck] = []
        self._turns = Turns(self)
        self._strangers = Strangers(self, self._checks) if self.workers > 1 else None

    # ------------------------------------------------------------ setting up

    def feed(self, source: BatchSampler | Stream) -> None:
        """Use `source` for the loop's batches."""
        self.source = source

    def connect(
        self, model: nn.Module, optimizer: Optimizer, *, reduces: bool, hooked: bool, shards: Shards | None = None
    ) -> ModelCheck:
        """Watch another model; `hooked`: the user's communication hook gets its gradients, and may apply them."""
        if reduces and not hooked and shards is None and self._strangers is not None:
            self._strangers.passes.connect(model)
        self._checks.append(ModelCheck(self, model, optimizer, reduces=reduces, shards=shards))
        return self._checks[-1]

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """If an error is raised inside, stop watching the models that were connected inside."""
        known = len(self._checks)
        try:
            yield
        except Exception:
            for check in self._checks[known:]:
                check.close()
            del self._checks[known:]
            raise

    def add_optimizer(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Watch a further optimizer of a connected model; False if the model is not connected yet."""
        if any(optimizer is check.optimizer for check in self._checks):
            raise UsageError(f"wrap() was already called with this optimizer: {WRAP_ONCE}")
        first = next((check for check in self._checks if check.model() is model), None)
        if first is not None:
            check = ModelCheck(self, model, optimizer, reduces=first.reduces, shards=first.shards)
            self._checks.append(check)
            first.partners.append(check)
        return first is not None

    def job_ends(self) -> None:
        """Stop checking: other code may go on to train the models with their optimizers."""
        self.source = None
        for check in self._checks:
            check.close()
        if self._strangers is not None:
            self._strangers.close()

    # ------------------------------------------------------------ in the order of a step

    def cut_short(self) -> str | None:
        """The message if the epoch that ends here has untrained samples; None if nothing is wrong."""
        left = 0 if self.source is None else self.source.cut_short
        return SHORT.format(left) if left else None

    def iteration_begins(self) -> None:
        """An iteration begins, or an epoch is chosen. Raise if the previous iteration left a batch without `step()`."""
        source = self.source
        if (short := self.cut_short()) is not None:
            self.fail(short)
        if source is not None and source.abandons and self.stepped is not None and not self.stepped.last:
            self.group += 1  # the round is dealt again: nothing may be added to its pieces' old gradients
        if source is None or not source.exhausted or source.batches_consumed >= source.batches_issued:
            return
        left = source.batches_issued - source.batches_consumed
        if self._turns.all_forwarded(source) or max((check.updates for check in self._checks), default=0) >= left:
            self.fail(f"the epoch ended, but controller.step() was not called for {left} of its batches: {STEP}")

    def look_at(self, piece: Piece, inputs: tuple[Any, ...]) -> None:
        """A forward pass of `inputs` that records gradients begins; `piece` is the current batch."""
        if self.source is not None and self._turns.pass_begins(self.source, piece, inputs):
            self.forwards, self.piece = self.forwards + 1, piece

    def backwards(self) -> int:
        return sum(check.backwards for check in self._checks)

    def growth(self) -> str | None:
        return None if self._turns.grown is None else self._turns.grown[1]

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        """`controller.step()`: the current batch is done."""
        source = self.source
        # A batch that had a forward pass has been received.
        if not self.forwards and source is not None and source.batches_consumed >= source.received()[0]:
            twice = "controller.step() was called twice for one batch, or before the first batch"
            self.fail(f"{twice}: {REPEATED if self.epoch_over() else STEP}")
        apart = piece.round.apart
        for check in self._checks:
            check.piece_done(round_over=piece.last and not apart)
        told = self._turns.piece_done(piece, seen.loss, counted=seen.count is not None or seen.given)
        if told is not None and seen.applied is None:
            self.tell(told)
        self.forwards, self.piece, self.stepped = 0, None, piece
        self.group += piece.last or apart


def _length(inputs: Iterable[Any]) -> int | None:
    """The length of the first dimension of the first tensor, which may be inside a mapping."""
    for value in inputs:
        if isinstance(value, Tensor):
            return len(value) if value.dim() else None
        if isinstance(value, Mapping) and (length := _length(value.values())) is not None:
            return length
    return None
