"""The message of an out-of-memory error in the user's own loop, before the job ends: nothing is tried again there."""

import weakref
from collections.abc import Callable

from dynamix.errors import MemoryLimitError
from dynamix.runtime.memory.gauge import is_out_of_memory
from dynamix.runtime.ranks.uncaught import tell_of_uncaught

_ADVICE = (
    "rank {rank} ran out of memory in a pass of {samples} samples: call controller.find_limits(step_fn, example) "
    "before training, which measures what fits every rank; or cut batches into pieces that fit, by "
    "Controller(micro_batch={pieces}) and `with controller.piece():` around the passes; "
    "or pass Controller(max_batch_size=[...]), one number per rank, below {samples} for rank {rank}"
)


class ExitNote:
    """As long as it lives, an out-of-memory error that nobody catches gets a note, and ends all ranks with its words.

    samples   what this rank was given in the step under way; None between steps
    tell      tells the other ranks, which may be waiting for this one

    Both are methods of an owner that is not kept alive for it.
    """

    def __init__(self, rank: int, samples: Callable[[], int | None], tell: Callable[[MemoryLimitError], None]) -> None:
        self.rank, self._told = rank, False
        self._samples, self._tell = weakref.WeakMethod(samples), weakref.WeakMethod(tell)
        tell_of_uncaught(self.uncaught)

    def uncaught(self, error: BaseException) -> None:
        """Add the note and tell the others, if it is such an error; once."""
        ask, tell = self._samples(), self._tell()
        if self._told or ask is None or tell is None or not is_out_of_memory(error) or not (samples := ask()):
            return
        self._told = True
        text = _ADVICE.format(rank=self.rank, samples=samples, pieces=max(samples // 2, 1))
        error.add_note(f"dynamix: {text}")
        tell(MemoryLimitError(text))
