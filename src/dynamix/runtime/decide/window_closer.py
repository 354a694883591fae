"""Closes a rank's measurement windows, and applies the decisions made on them."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from dynamix.data import Allocations, BatchSampler, Piece, Round, Stream
from dynamix.errors import DynamixError, StateError
from dynamix.model.sync_schedule import SyncSchedule
from dynamix.runtime.decide.channel import DecisionChannel
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts, Kind, Message
from dynamix.runtime.facts.progress import Progress
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.part import Part
from dynamix.runtime.ranks.compare import PLACE
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.window import Ints

Told = tuple[int, float]


class WindowCloser(Part):
    """Closes the windows of a job, and settles them: receives and applies the decisions.

    It is a sampler's `owner`. A loop's reading thread may settle, too, before it gets batches that a decision affects.
    `horizon` is the first round that a pending decision may still change; infinite if none is pending. It changes only
    under `lock`, and a sampler holds `lock` when it states which round it begins to plan.

    interval   optimizer steps of the first window
    paced      the policy sets the length of later windows
    told       returns a row's figures of the exchange: backward passes that have crossed ranks so far; bytes sent to
               average parameters, relative to a gradient's
    begins     called before every iteration of the sampler; `resumed`: at the first batch after a load
    """

    def __init__(
        self,
        job: JobFacts,
        channel: DecisionChannel,
        ranks: Ranks,
        allocations: Allocations,
        progress: Progress,
        recorder: Recorder,
        *,
        interval: int,
        paced: bool,
        told: Callable[[], Told],
        begins: Callable[[], None],
        resumed: Callable[[], None],
    ) -> None:
        self.job, self.channel, self.ranks = job, channel, ranks
        self.allocations, self.progress, self.recorder = allocations, progress, recorder
        self._interval, self._paced, self._told = interval, paced, told
        self.iteration_begins, self.resumed = begins, resumed
        self.source: BatchSampler | Stream | None = None
        self.changes = 0  # of sizes, since this process began
        self.ended_s = 0.0  # when the newest round ended, on the clock `time.perf_counter`
        self.lock, self.horizon = threading.Lock(), math.inf
        self._settling = threading.Lock()
        self._differ = False  # ranks are to compare their state after this round
        self._lag_said = False
        self._reader_failed: DynamixError | None = None  # an error in the reading thread that ends the job

    def feed(self, source: BatchSampler | Stream) -> None:
        """Take rounds from `source`; this object is its owner."""
        self.source = source

    # ------------------------------------------------------------ the coming round

    @property
    def meeting(self) -> SyncSchedule:
        """How workers synchronise."""
        return self.job.sync_schedule

    @property
    def pending(self) -> bool:
        """Whether a window's decision is pending."""
        return self.horizon < math.inf

    @property
    def next_round(self) -> int:
        """The coming round; after a load without a sampler, the first round in the allocations."""
        return self.allocations.begin if self.source is None else self.source.rounds

    @property
    def batch_sizes(self) -> Ints:
        """Samples of every worker in the coming round, int64 (W,)."""
        return self.allocations.at(self.next_round).copy()

    @property
    def piece_apart(self) -> int:
        """Samples of a worker's local step in the coming round, if its allocation uses local steps."""
        return self.allocations.piece_at(self.next_round)

    def put_in_force(self, sizes: Ints) -> None:
        """From the coming round, use `sizes` (W,), samples per round, without a change of how workers synchronise."""
        self.allocations.reset(self.next_round, sizes, self.piece_apart)

    def measures(self, piece: Piece) -> bool:
        """Whether the open window will keep a batch's measurements; the same on all ranks."""
        # Only agreed values: a rank may have settled a pending decision already, and all ranks must reduce alike.
        return piece.plan.regular and piece.round.index >= max(self.progress.opens, self.job.closing.consumed + 1)

    # ------------------------------------------------------------ a round is over

    def round_done(self, done: Round) -> None:
        job, recorder = self.job, self.recorder
        self.ended_s = time.perf_counter()
        with self.lock:  # decide whether to keep a step before or after a new window opens, not during
            kept = done.regular and done.index >= self.progress.opens
            dealt = None if done.work is None else done.dealt_to(self.ranks.rank)
            recorder.step_done(keep=kept, first_of_epoch=done.first, dealt=dealt)
        if self.horizon < math.inf or self._reader_failed is not None:
            self.settle()
        if job.unlike is not None or (job.weight_test is not None and job.weight_test.wrong is not None):
            job.require_right()
        if self._differ:
            self._compare(done)
        enough = self._interval  # optimizer steps; rounds if the number of steps per round changes
        if done.piece and recorder.steps and not self._paced:
            enough = max(1, round(enough * done.at_once / int(self.allocations.at(done.index).sum())))
        if recorder.steps and (done.last if job.per_epoch else recorder.steps >= enough):
            with self.lock:  # no further round may begin until the window is pending
                self._close(done)

    def _close(self, done: Round) -> None:
        job, source, at = self.job, self.source, done.index
        crossed, payload = self._told()
        compares = isinstance(source, BatchSampler) and source.compares and not done.apart
        issued = (at + 1 if source is None else source.begun) + job.ahead
        closing = self._window(at, at + 1, issued, payload=payload, comparable=compares)
        job.window_closed(closing)
        if not done.piece:
            self._warn_of_lag(issued - closing.consumed)
        mine, place = float(closing.sizes[self.ranks.rank]), self._place(done)
        weight = mine / float(closing.sizes.sum())
        held = job.parting.row(place) if self.ranks.workers > 1 else ()
        turn = {"epoch": done.epoch, "crossed": crossed}
        row = self.recorder.row(issued=issued, count=mine, weight=weight, **turn, held=held)
        self.channel.send(row, closing)
        self.horizon = issued + job.slack

    def rest(self) -> ClosedWindow | None:
        """The steps since the last window closed, as a window without a decision; None if there are none."""
        source = self.source
        if source is None or self.progress.steps == self.job.closing.step:
            return None
        done = source.rounds
        return self._window(max(done - 1, self.allocations.begin), done, done)

    def _window(self, at: int, done: int, issued: int, **about: Any) -> ClosedWindow:
        """The open window after `done` rounds, under the allocation of round `at`; `about`: further fields."""
        now, ledger = self.progress, self.allocations
        sizes, age, piece = ledger.at(at).copy(), float(done - ledger.since(at)), ledger.piece_at(at)
        return ClosedWindow(now.window, sizes, done, issued, age, now.steps, now.samples, piece=piece, **about)

    def _place(self, done: Round) -> dict[str, int]:
        start = done.start + int(done.counts[:-1].sum())  # position of its last micro-step
        return dict(zip(PLACE, (self.progress.steps, self.progress.samples, start, self.progress.passed), strict=True))

    def _compare(self, done: Round) -> None:
        """Compare with the other ranks the state whose digests differed. A collective call."""
        self._differ = False
        self.ranks.compare(*self.job.parting.facts(self._place(done)))

    def _warn_of_lag(self, rounds: int) -> None:
        """The loader has issued `rounds` rounds ahead, so a decision takes effect only after them."""
        job, interval = self.job, self._interval
        if rounds <= 2 * interval or self._paced or job.per_epoch or self._lag_said:
            return
        self._lag_said = True
        late = f"the loader of rank {self.ranks.rank} reads {rounds} rounds ahead, more than two windows of {interval}"
        fix = "lower num_workers x prefetch_factor, or raise interval"
        warnings.warn(f"{late}, so new sizes take effect only after them: {fix}", RuntimeWarning, stacklevel=2)

    # ------------------------------------------------------------ a decision comes into force

    def settle(self) -> None:
        """Wait for the pending message, if any, and apply it. Raises an error that a reading thread raised."""
        with self._settling:
            if self._reader_failed is not None:
                raise self._reader_failed
            if not self.pending:
                return
            try:
                message = self.channel.receive()
                with self.lock:
                    self._take(message)
            except DynamixError as error:
                self.keep_for_the_loop(error)
                raise
            finally:
                self.horizon = math.inf

    def keep_for_the_loop(self, error: DynamixError) -> None:
        """Keep an error that is about to be raised in the user's reading thread, which may not pass it on."""
        if self.source is not None and not self.source.consumed_here:
            self._reader_failed = self._reader_failed or error

    def fail(self, error: DynamixError) -> DynamixError:
        """Prepare an error that ends the job: inform the other ranks, and return it."""
        self.keep_for_the_loop(error)
        return self.ranks.end(error)

    def _take(self, message: Message) -> None:
        source, new = self.source, message.kind is Kind.NEW
        if new and source is not None and message.from_step < (issued := source.begun):
            late = f"starts at step {message.from_step}, but {issued} are already issued"
            fix = "replay with that run's policy and interval, and its num_workers and prefetch_factor or fewer"
            raise StateError(f"the replayed allocation {late}: {fix}")
        self.progress.told(
            self.job.closing.consumed + 1,
            message.noise,
            message.signal,
            interval=message.interval,
            opens=message.from_step if new else None,
        )
        self._interval = message.interval or self._interval
        self._differ |= message.differ
        if new:
            self.allocations.schedule(message.from_step, message.sizes, message.piece)
            self.changes += 1
            self.recorder.reset()
        if source is not None:
            self.allocations.forget(source.rounds)

    def loaded(self) -> None:
        """A state was loaded: use its length of the open window."""
        if self._paced and self.progress.interval:
            self._interval = self.progress.interval

    def drain(self) -> None:
        """Apply a pending decision, and wait until no work is left."""
        self.settle()
        self.channel.drain()

    def alike(self) -> dict[str, Any]:
        """State that must be equal on all ranks, by name."""
        return {"batch sizes": self.allocations.from_on(self.next_round), "batch size apart": self.piece_apart}
