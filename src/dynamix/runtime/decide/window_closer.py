"""The windows of a rank's job: when they close, and when what was decided on them comes into force."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Protocol

from dynamix.data import Allocations, BatchSampler, StepPlan, Stream
from dynamix.errors import DynamixError, StateError
from dynamix.runtime.check.loop import LoopCheck
from dynamix.runtime.decide.channel import DecisionChannel, Kind, Message
from dynamix.runtime.decide.job_facts import ClosedWindow, JobFacts
from dynamix.runtime.decide.peer_channel import PeerChannel
from dynamix.runtime.decide.progress import Progress
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.compare import PLACE
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.rate.rates import Rates
from dynamix.runtime.sync.connected_model import ConnectedModel


class Deciding(Protocol):
    """What of a `TrainingJob` windows and decisions concern."""

    job: JobFacts
    channel: DecisionChannel | PeerChannel
    allocations: Allocations
    progress: Progress
    recorder: Recorder
    rates: Rates
    source: BatchSampler | Stream | None
    accumulate: int
    interval: int
    paced: bool
    per_epoch: bool
    rank: int
    payload: Callable[[], float]
    ranks: Ranks
    loop: LoopCheck
    connected: list[ConnectedModel]
    steps_apart: bool

    @property
    def crossed(self) -> int: ...

    def need_source(self) -> BatchSampler | Stream: ...


class WindowCloser:
    """Closes the windows of `of`, and settles: takes the answers to them.

    A loop may be read ahead by a thread of its own, which settles what concerns the batches that it asks for.
    """

    def __init__(self, of: Deciding) -> None:
        self.of = of
        self.differ = False  # the ranks are to compare what they hold once this round is over
        self.changes = 0  # of the sizes, since this process began
        self._settling, self._turn, self._taking = threading.Lock(), threading.Lock(), False
        self.ended_s = 0.0  # of the newest round, on the clock `time.perf_counter`
        self._lag_said = False
        self._reader_failed: DynamixError | None = None  # what ends the job was raised in that thread

    def count(self, plan: StepPlan) -> None:
        """A round is over."""
        of = self.of
        self.ended_s = time.perf_counter()
        with self._turn:  # whether a step is kept is known before, or after, a new window opens
            kept = plan.regular and plan.index // of.accumulate >= of.progress.opens
            dealt = plan.dealt_to(of.rank)
            of.recorder.step_done(keep=kept, first_of_epoch=plan.first, dealt=dealt)

    def close_if_full(self, plan: StepPlan, *, ahead: int) -> None:
        """After `plan`'s round; `ahead` as in `TrainingJob.step_done`."""
        of = self.of
        steps = of.recorder.steps
        if steps and (plan.last if of.per_epoch else steps >= self._rounds_of_window(plan)):
            with self._turn:  # no further round is begun until the window waits for its answer
                self._close_window(plan, -(-of.need_source().begun // of.accumulate) + ahead)

    def _rounds_of_window(self, plan: StepPlan) -> int:
        """Rounds that make a window, the same on all ranks: `interval` optimizer steps, at least one round; where their
        number follows what changes, it is that of rounds."""
        of = self.of
        if of.rates.at_once is None or of.paced:
            return of.interval
        total = int(of.allocations.at(plan.index).sum())
        at_once = plan.at_once or (of.rates.at_once if plan.apart else total)
        return max(1, round(of.interval * at_once / total))

    def _close_window(self, plan: StepPlan, issued: int) -> None:
        of = self.of
        sizes, progress = of.accumulate * of.allocations.at(plan.index), of.progress
        age = (plan.index + 1 - of.allocations.since(plan.index)) / of.accumulate
        steps, samples, rate = progress.steps, progress.samples, of.rates.relative()
        done, payload = plan.index // of.accumulate + 1, of.payload()
        alike = isinstance(of.source, BatchSampler) and of.source.compares and not plan.apart
        closing = of.job.closing = ClosedWindow(
            *(progress.window, sizes, done, issued, age, steps, samples, rate, payload),
            piece=of.allocations.piece_at(plan.index),
            comparable=alike,
        )
        self._warn_of_lag(closing.issued - closing.consumed)
        mine = float(sizes[of.rank])
        turn = {"epoch": plan.epoch, "crossed": of.crossed}
        held = self._held(plan)
        row = of.recorder.row(issued=issued, count=mine, weight=mine / float(sizes.sum()), **turn, held=held)
        of.channel.send(row, closing)

    def rest(self) -> ClosedWindow | None:
        """What was trained since the last window closed, as a window that nobody decides on; None if nothing was."""
        of, progress = self.of, self.of.progress
        if progress.steps == of.job.closing.step:
            return None
        done = of.need_source().consumed
        at = max(done - 1, of.allocations.begin)
        sizes, age = of.accumulate * of.allocations.at(at), (done - of.allocations.since(at)) / of.accumulate
        done //= of.accumulate
        piece = of.allocations.piece_at(at)
        return ClosedWindow(progress.window, sizes, done, done, age, progress.steps, progress.samples, piece=piece)

    def _held(self, plan: StepPlan) -> list[float] | None:
        """What this rank's row says of what all ranks hold alike; None where there are no others."""
        of = self.of
        if of.ranks.workers < 2:
            return None
        # Workers that step apart have taken unlike numbers of steps, which their optimizers may count.
        optimizers = [] if of.steps_apart else of.loop.optimizers
        models = [one.model for one in of.connected if one.shards is None and one.hook is not None and one.hook.alike]
        return of.job.parting.row(optimizers, models, self._place(plan))

    def _place(self, plan: StepPlan) -> dict[str, int]:
        return dict(zip(PLACE, (self.of.progress.steps, self.of.progress.samples, plan.start), strict=True))

    def compare(self, plan: StepPlan) -> None:
        """Compare with the other ranks, after `plan`'s round, what digests were not alike of.

        A collective call; raises as `Ranks.compare`.
        """
        of, self.differ = self.of, False
        optimizers = [] if of.steps_apart else of.loop.optimizers
        of.ranks.compare(*of.job.parting.facts(optimizers, self._place(plan)))

    def _warn_of_lag(self, rounds: int) -> None:
        """The loader has issued so many rounds ahead: a decision waits for them."""
        of = self.of
        if rounds <= 2 * of.interval or of.paced or of.per_epoch or self._lag_said or of.rates.at_once is not None:
            return
        self._lag_said = True
        late = f"the loader of rank {of.rank} reads {rounds} rounds ahead, more than two windows of {of.interval}"
        fix = "lower num_workers x prefetch_factor, or raise interval"
        warnings.warn(f"{late}, so a decision applies only after them: {fix}", RuntimeWarning, stacklevel=2)

    def settle(self) -> None:
        """Take the pending message, if there is one: the agreed wait. Raises what a thread that reads ahead raised."""
        of = self.of
        with self._settling:
            if self._reader_failed is not None:
                raise self._reader_failed
            if of.channel.pending:
                self._taking = True
                try:
                    message = of.channel.receive()
                    with self._turn:
                        self._take(message)
                except DynamixError as error:
                    self.keep_for_the_loop(error)
                    raise
                finally:
                    self._taking = False

    def keep_for_the_loop(self, error: DynamixError) -> None:
        """An error is about to be raised: in a thread of the user's, which need not hand it on, it is not lost."""
        of = self.of
        if of.source is not None and not of.source.consumed_here:
            self._reader_failed = self._reader_failed or error

    def _take(self, message: Message) -> None:
        of = self.of
        of.progress.told(of.job.closing.consumed + 1, message.noise, message.signal, message.interval)
        of.interval = message.interval or of.interval
        self.differ |= message.differ
        if message.kind is Kind.NEW:
            if of.source is not None and message.from_step < (issued := -(-of.source.issued // of.accumulate)):
                late = f"starts at step {message.from_step}, but {issued} are already issued"
                fix = "replay with that run's policy and interval, and its num_workers and prefetch_factor or fewer"
                raise StateError(f"the replayed allocation {late}: {fix}")
            sizes = message.sizes // of.accumulate
            of.allocations.schedule(message.from_step * of.accumulate, sizes, message.piece)
            of.progress.opens = message.from_step
            self.changes += 1
            of.recorder.reset()
        if of.source is not None:
            of.allocations.forget(of.source.consumed)

    def before_issue(self, step: int) -> None:
        """The sampler is about to plan micro-step `step`: a pending message may concern it."""
        of = self.of
        while True:
            with self._turn:
                waits = of.channel.pending or self._taking
                if not waits or step // of.accumulate < of.job.closing.issued + of.job.slack:
                    of.need_source().begin_to_issue(step)
                    return
            self.settle()
