"""How much a job is to learn, and whether it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dynamix.data import BatchSampler, Stream
from dynamix.errors import ConfigError, UsageError, spelling
from dynamix.runtime.facts.progress import Progress
from dynamix.runtime.limits import check_counts


class Budget:
    """A number of samples in rounds of the size at the start, or more samples that teach as much.

    By the measured gradient noise a sample of a larger round teaches less: AdaScale SGD counts a step of s times the
    samples as `gain` steps (Johnson et al., arXiv 2007.05105). So a job whose global batch grows trains on more
    samples, but ends sooner if these take less time. The budget is the same on all ranks after every round.

    Iterating yields epoch numbers of `source` until the budget is spent, or `leaves` is true.

    samples, epochs   one of them: samples or epochs of the data set, trained in rounds of the size at the start
    count             "progress": what samples teach; "samples": the number of samples
    leaves            whether to leave the loop for another reason

    Raises `ConfigError` for impossible values, and `UsageError` while iterating if an epoch trains nothing.
    """

    def __init__(
        self,
        progress: Progress,
        source: BatchSampler | Stream,
        samples: int | None = None,
        *,
        epochs: int | None = None,
        count: str = "progress",
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        if epochs is not None:
            samples = _samples_of(source, epochs, samples)
        if samples is None:
            raise ConfigError("samples, epochs", None, "one of them", "give epochs= of the data set, or samples=")
        check_counts(samples=samples)
        if count not in (known := ("progress", "samples")):
            raise ConfigError("count", count, "'progress' or 'samples'", spelling(count, known))
        self.samples, self.count = samples, count
        self._progress, self._source, self._leaves = progress, source, leaves

    def __iter__(self) -> Iterator[int]:
        before = -1
        while not (self.done or self._leaves()):
            if self._progress.steps == before:
                fix = "Train on the batches of the controller's loader, and call controller.step() after each"
                raise UsageError(f"an epoch of the budget trained nothing, so training would never end. {fix}")
            before = self._progress.steps
            yield self._source.epoch + self._source.finished

    @property
    def spent(self) -> float:
        """The samples of the budget that are spent."""
        return self._progress.learned if self.count == "progress" else float(self._progress.samples)

    def within(self, taught: float, *, spent: bool) -> float:
        """The part of what a round `taught` that the budget still covers: past its end a cosine would rise again."""
        return min(taught, max(self.samples - self.spent + taught * spent, 0.0))

    @property
    def done(self) -> bool:
        """Whether the budget is spent."""
        return self.spent >= self.samples * (1 - 1e-9)


def _samples_of(source: BatchSampler | Stream, epochs: int, samples: int | None) -> int:
    if samples is not None:
        raise ConfigError("samples", samples, "None together with epochs", "give one of them")
    check_counts(epochs=epochs)
    if (length := source.epoch_length()) is None:
        raise ConfigError("epochs", epochs, "None with data of unknown length", "give samples= instead")
    return epochs * length
