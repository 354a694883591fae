"""What an out-of-memory in the user's own loop says before the process ends: nothing is tried again there."""

from collections.abc import Callable

from dynamix.runtime.memory.gauge import is_out_of_memory
from dynamix.runtime.uncaught import tell_of_uncaught


def advice(rank: int, samples: int) -> str:
    """How to prevent it on a rank that ran out with `samples` samples."""
    measure = "let controller.find_limits(step_fn, example) measure what fits before training"
    return f"pass Controller(max_batch_size=[...]), one number per rank, below {samples} for rank {rank}, or {measure}"


class ExitNote:
    """As long as it lives, an out-of-memory error that nobody catches gets a note with advice.

    samples   what this rank was given in the step under way; None between steps
    """

    def __init__(self, rank: int, samples: Callable[[], int | None]) -> None:
        self.rank, self.samples = rank, samples
        tell_of_uncaught(self)

    def uncaught(self, error: BaseException) -> None:
        """Add the note, if it is such an error."""
        if is_out_of_memory(error) and (text := self.text()) is not None:
            error.add_note(text)

    def text(self) -> str | None:
        """The note for an error of this moment."""
        if not (samples := self.samples()):
            return None
        return (
            f"dynamix: rank {self.rank} ran out of memory in a step of {samples} samples, and other ranks may be "
            f"waiting for it, so the step is not tried again. {advice(self.rank, samples)}; "
            "controller.backward(loss_fn, batch) goes on in smaller pieces instead"
        )
