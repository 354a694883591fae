"""Read-only properties of a controller, for a training loop: they cost nothing and wait for nobody."""

from __future__ import annotations

from dynamix.runtime.job import TrainingJob
from dynamix.runtime.limits import check_counts
from dynamix.runtime.metrics import metrics_of
from dynamix.window import Bounds, Ints


class ControllerStatus:
    """The state of a job, as its `Controller` tells."""

    _job: TrainingJob
    overhead_s: float  # seconds in all calls of `step`

    @property
    def bounds(self) -> Bounds:
        """The bounds of batch sizes, samples per round: as given, narrowed by the data set and `find_limits`."""
        return self._job.facts.bounds

    @property
    def base_batch(self) -> int:
        """Samples per round of all workers at the start of the job: what learning-rate rules compare with."""
        return self._job.facts.base_batch

    @property
    def optimizer_due(self) -> bool:
        """Whether the optimizer steps with this batch: it is the last of this rank's share of the round."""
        piece = self._job.need_source().piece()
        return piece.round.apart or piece.last

    @property
    def met(self) -> bool:
        """Whether the batch just stepped ended a round: between rounds evaluate, save, or leave the loop."""
        stepped = self._job.loop.stepped
        return stepped is None or stepped.last

    def checkpoint_due(self, *, every: int) -> bool:
        """Whether to save now: at the first meeting after `every` optimizer steps, on all ranks alike.

        Ask on all ranks after every `step()`. Steps are counted since it was last true, from the start or the load of a
        state on; where workers step apart, those of a worker in the mean. Each `every` has a count of its own. Asked
        again before the next `step()`, it answers the same. No collective call. At a meeting all ranks are here, so a
        loop may also evaluate, talk to the other ranks, or end if this is true.

        Raises `ConfigError` if `every` is not a whole number of 1 or more.
        """
        check_counts(every=every)
        return self.met and self._job.progress.due(every)

    @property
    def batch_sizes(self) -> Ints:
        """Samples of every worker in the coming round, int64 (W,)."""
        return self._job.windows.batch_sizes

    @property
    def samples_seen(self) -> int:
        """Samples trained on so far, by all workers."""
        return self._job.progress.samples

    @property
    def progress(self) -> float:
        """Part of the epoch's samples trained on by all workers: 0 to 1, and 1 until the next epoch begins.

        NaN for a stream whose length is not known before its end.
        """
        return self._job.need_source().progress

    @property
    def epoch_done(self) -> bool:
        """Whether the batch just stepped was its epoch's last; the same on all ranks. False once the next one begins.

        For loops that count steps of their own: a moving batch makes no fixed number of them.
        """
        return self._job.need_source().finished

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger, as this rank knows them now; `dynamix.runtime.metrics.METRICS` says what they mean.

        Neither a collective call nor a wait for a device: call it on one rank or on all, as often as you like.
        """
        return metrics_of(self._job.windows, self._job.rates, self.overhead_s)

    @property
    def stopping(self) -> bool:
        """Whether to leave the loop now: on all ranks after the same optimizer step.

        Once one of them has asked for it (`request_stop`), or the job's `budget` is spent.
        """
        return self._job.stopping
