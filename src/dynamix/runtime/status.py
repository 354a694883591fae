"""Read-only properties of a controller, for a training loop. They cost nothing and never wait."""

from __future__ import annotations

from dynamix.runtime.job import TrainingJob
from dynamix.runtime.limits import check_counts
from dynamix.runtime.metrics import metrics_of
from dynamix.window import Bounds, Ints


class ControllerStatus:
    """The state of a job that a loop can read from its `Controller`."""

    _job: TrainingJob
    overhead_s: float  # seconds in all calls of `step`

    @property
    def bounds(self) -> Bounds:
        """The bounds of batch sizes, samples per round: as given, narrowed by the data set and `find_limits`."""
        return self._job.facts.bounds

    @property
    def base_batch(self) -> int:
        """Samples per round of all workers at the start of the job; learning-rate rules compare with it."""
        return self._job.facts.base_batch

    @property
    def optimizer_due(self) -> bool:
        """Whether to step the optimizer with this batch: the last of this rank's share, or any in local steps."""
        piece = self._job.need_source().piece()
        return piece.round.apart or piece.last

    @property
    def met(self) -> bool:
        """Whether the last `step()` ended a round. Only between rounds evaluate, save, or leave the loop."""
        stepped = self._job.loop.stepped
        return stepped is None or stepped.last

    def checkpoint_due(self, *, every: int) -> bool:
        """Whether to save now: at the end of the first round after `every` optimizer steps; the same on all ranks.

        Ask on all ranks after every `step()`. Steps count from when it was last true, or from the start or the load of
        a state. Local steps count as their mean over workers. Each `every` has its own count. Until the next `step()`
        the answer stays the same. No collective call. If it is true, all ranks are at the end of a round, so a loop may
        also evaluate, communicate with the other ranks, or end.

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
        """Samples trained on so far by all workers."""
        return self._job.progress.samples

    @property
    def progress(self) -> float:
        """Fraction of the epoch's samples that all workers have trained on: 0 to 1, and 1 until the next epoch begins.

        NaN for a stream until its length is known, at its end.
        """
        return self._job.need_source().progress

    @property
    def epoch_done(self) -> bool:
        """Whether the last `step()` ended an epoch; the same on all ranks. False once the next epoch begins.

        For loops that count steps: if batch sizes change, so does the number of steps per epoch.
        """
        return self._job.need_source().finished

    def metrics(self) -> dict[str, float]:
        """Figures for a logger, as this rank knows them now; `dynamix.runtime.metrics.METRICS` explains them.

        No collective call, no waiting for a device: call it on one rank or on all, as often as you like.
        """
        return metrics_of(self._job.windows, self._job.rates, self.overhead_s)

    @property
    def stopping(self) -> bool:
        """Whether to leave the loop now; true on all ranks after the same optimizer step.

        It becomes true after a rank's `request_stop`, or when the job's `budget` is spent.
        """
        return self._job.stopping
