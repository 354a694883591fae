"""The message of an out-of-memory error in the user's own loop, which ends the job: the pass is not retried."""

import weakref
from collections.abc import Callable

from dynamix.errors import MemoryLimitError
from dynamix.runtime.memory.gauge import is_out_of_memory
from dynamix.runtime.ranks.uncaught import tell_of_uncaught

_ADVICE = (
    "rank {rank} ran out of memory in a pass of {samples} samples: call controller.find_limits(step_fn, example) "
    "before training, which measures what fits every rank; or cut batches into pieces that fit, by "
    "Controller(micro_batch={pieces}) and `if controller.optimizer_due: optimizer.step()`; "
    "or pass Controller(max_batch_size=[...], batch_size=...), both below {samples} on rank {rank}"
)


class ExitNote:
    """While it lives, an uncaught out-of-memory error gets a note, and ends all ranks with that message.

    samples   number of samples that this rank got for the current step; None between steps
    tell      informs the other ranks, which may be waiting for this one

    Both are methods of an owner to which this object keeps only weak references.
    """

    def __init__(self, rank: int, samples: Callable[[], int | None], tell: Callable[[MemoryLimitError], None]) -> None:
        self.rank, self._told = rank, False
        self._samples, self._tell = weakref.WeakMethod(samples), weakref.WeakMethod(tell)
        tell_of_uncaught(self.uncaught)

    def uncaught(self, error: BaseException) -> None:
        """If it is such an error, add the note and inform the other ranks; once."""
        ask, tell = self._samples(), self._tell()
        if self._told or ask is None or tell is None or not is_out_of_memory(error) or not (samples := ask()):
            return
        self._told = True
        text = _ADVICE.format(rank=self.rank, samples=samples, pieces=max(samples // 2, 1))
        error.add_note(f"dynamix: {text}")
        tell(MemoryLimitError(text))
