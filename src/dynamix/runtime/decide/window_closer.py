"""The windows of a rank's job: when they close, and when what was decided on them comes into force."""

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
    """Closes the windows of a job, and settles: takes the answers to them.

    A loop may be read ahead by a thread of its own, which settles what concerns the batches that it asks for. So this
    is what a sampler calls its `owner`: `horizon` is the first round that a decision under way may still change,
    infinite where none is. It changes under `lock` alone, under which a sampler says which round it begins to plan.

    interval   optimizer steps of the first window
    paced      the policy says how long later ones are
    told       what a row says of the exchange: backward passes that have crossed ranks so far; bytes that a meeting
               over parameters moves, over those of a gradient
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
        self.changes = 0  # of the sizes, since this process began
        self.ended_s = 0.0  # of the newest round, on the clock `time.perf_counter`
        self.lock, self.horizon = threading.Lock(), math.inf
        self._settling = threading.Lock()
        self._differ = False  # the ranks are to compare what they hold once this round is over
        self._lag_said = False
        self._reader_failed: DynamixError | None = None  # what ends the job was raised in that thread

    def feed(self, source: BatchSampler | Stream) -> None:
        """Rounds come from `source`, whose owner this is."""
        self.source = source

    # ------------------------------------------------------------ the coming round

    @property
    def meeting(self) -> SyncSchedule:
        """How workers meet."""
        return self.job.sync_schedule

    @property
    def pending(self) -> bool:
        """Whether a window waits for its answer."""
        return self.horizon < math.inf

    @property
    def next_round(self) -> int:
        """The coming round; of a loaded checkpoint without its sampler yet, the first its ledger still knows."""
        return self.allocations.begin if self.source is None else self.source.rounds

    @property
    def batch_sizes(self) -> Ints:
        """Samples of every worker in the coming round, int64 (W,)."""
        return self.allocations.at(self.next_round).copy()

    @property
    def piece_apart(self) -> int:
        """Samples of a worker's own step in the coming round, where the allocation says that workers step apart."""
        return self.allocations.piece_at(self.next_round)

    def put_in_force(self, sizes: Ints) -> None:
        """Begin the ledger anew with `sizes` (W,), samples per round, from the coming round on, in the same way."""
        self.allocations.reset(self.next_round, sizes, self.piece_apart)

    def measures(self, piece: Piece) -> bool:
        """Whether the open window will keep what is measured of a batch; the same on all ranks."""
        # Agreed values only: what is pending here may be settled on another rank, and all must reduce alike.
        open_from = max(self.progress.opens, self.job.closing.consumed + 1)
        return piece.plan.regular and piece.round.index >= open_from

    # ------------------------------------------------------------ a round is over

    def round_done(self, done: Round) -> None:
        job, recorder = self.job, self.recorder
        self.ended_s = time.perf_counter()
        with self.lock:  # whether a step is kept is known before, or after, a new window opens
            kept = done.regular and done.index >= self.progress.opens
            dealt = None if done.work is None else done.dealt_to(self.ranks.rank)
            recorder.step_done(keep=kept, first_of_epoch=done.first, dealt=dealt)
        if self.horizon < math.inf or self._reader_failed is not None:
            self.settle()
        if job.unlike is not None or (job.weight_test is not None and job.weight_test.wrong is not None):
            job.require_right()
        if self._differ:
            self._compare(done)
        enough = self._interval  # optimizer steps; rounds if their number follows what changes
        if done.piece and recorder.steps and not self._paced:
            enough = max(1, round(enough * done.at_once / int(self.allocations.at(done.index).sum())))
        if recorder.steps and (done.last if job.per_epoch else recorder.steps >= enough):
            with self.lock:  # no further round is begun until the window waits for its answer
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
        """The training since the last window closed, as a window that nobody decides on; None if there was none."""
        source = self.source
        if source is None or self.progress.steps == self.job.closing.step:
            return None
        done = source.rounds
        return self._window(max(done - 1, self.allocations.begin), done, done)

    def _window(self, at: int, done: int, issued: int, **about: Any) -> ClosedWindow:
        """The open window as it is after `done` rounds, under the allocation of round `at`; `about`: what else."""
        now, ledger = self.progress, self.allocations
        sizes, age, piece = ledger.at(at).copy(), float(done - ledger.since(at)), ledger.piece_at(at)
        return ClosedWindow(now.window, sizes, done, issued, age, now.steps, now.samples, piece=piece, **about)

    def _place(self, done: Round) -> dict[str, int]:
        start = done.start + int(done.counts[:-1].sum())  # of its last micro-step
        return dict(zip(PLACE, (self.progress.steps, self.progress.samples, start), strict=True))

    def _compare(self, done: Round) -> None:
        """Compare with the other ranks what digests were not alike of. A collective call."""
        self._differ = False
        self.ranks.compare(*self.job.parting.facts(self._place(done)))

    def _warn_of_lag(self, rounds: int) -> None:
        """The loader has issued so many rounds ahead: a decision waits for them."""
        job, interval = self.job, self._interval
        if rounds <= 2 * interval or self._paced or job.per_epoch or self._lag_said:
            return
        self._lag_said = True
        late = f"the loader of rank {self.ranks.rank} reads {rounds} rounds ahead, more than two windows of {interval}"
        fix = "lower num_workers x prefetch_factor, or raise interval"
        warnings.warn(f"{late}, so new sizes take effect only after them: {fix}", RuntimeWarning, stacklevel=2)

    # ------------------------------------------------------------ a decision comes into force

    def settle(self) -> None:
        """Take the pending message, if there is one: the agreed wait. Raises what a thread that reads ahead raised."""
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
        """An error is about to be raised: in a thread of the user's, which need not hand it on, it is not lost."""
        if self.source is not None and not self.source.consumed_here:
            self._reader_failed = self._reader_failed or error

    def fail(self, error: DynamixError) -> DynamixError:
        """An error that ends the job: the other ranks are told of it."""
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
        """A state was loaded: the window now open has the length that the policy said."""
        if self._paced and self.progress.interval:
            self._interval = self.progress.interval

    def drain(self) -> None:
        """Wait until nothing is under way, of which the answers are taken."""
        self.settle()
        self.channel.drain()

    def alike(self) -> dict[str, Any]:
        """Facts that every rank must hold alike, by name."""
        return {"batch sizes": self.allocations.from_on(self.next_round), "batch size apart": self.piece_apart}
