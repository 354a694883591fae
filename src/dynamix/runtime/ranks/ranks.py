"""Access to the other ranks of a job: waits that can be aborted, comparisons, errors that reach all ranks."""

from __future__ import annotations

import pickle
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dynamix.errors import DynamixError, UsageError, WorkerLostError
from dynamix.runtime.ranks.compare import FIXES, GROUPS, PLACE, require_same
from dynamix.runtime.ranks.errors import ALIKE, FIRST_PASS
from dynamix.runtime.ranks.group import ControlGroup
from dynamix.runtime.ranks.liveness import failed_collective
from dynamix.runtime.ranks.rendezvous import require_alone
from dynamix.runtime.ranks.watch import CLOSED, LOOK_EVERY, LOOK_EVERY_S, AbortableWait, Look, RankWatch

_PARTED = {
    "": "Set optimizer values in the same way on every rank: from the step number, not from what one rank measures",
    GROUPS: "Make the same calls of add_param_group on every rank",
    **dict.fromkeys(PLACE, "Train every batch that the loader gives, on every rank, and load one checkpoint on all"),
}


class Ranks:
    """The ranks of a controller's own `group`. `rank` is this rank's number among `workers`.

    agreed   whether they have compared their state since the start or the last load
    """

    group: ControlGroup | None

    def __init__(self, group: ControlGroup, watch: RankWatch) -> None:
        self.group, self.rank, self.workers, self.agreed = group, group.rank, group.workers, False
        self._control, self._watch = group, watch

    @property
    def lost(self) -> WorkerLostError | None:
        """The error raised for a lost rank, if any."""
        return self._watch.lost

    # ------------------------------------------------------------ waits

    def wait(self, work: Any, what: str = "") -> None:
        """`work.wait()` for a collective or its future. The wait ends if another rank ends the job.

        what   its purpose, in words: if it fails, a `WorkerLostError` then names the rank
        """
        future = isinstance(work, torch._C.Future)  # a hook may return another type than `torch.futures.Future`
        if not (work.done() if future else work.is_completed()):
            arrived = threading.Event()
            # On CUDA it completes at once, like `work.wait()`: neither waits for the device.
            (work if future else work.get_future()).add_done_callback(lambda _: arrived.set())
            wait = None
            while not arrived.wait(LOOK_EVERY_S):
                wait = wait or AbortableWait(self._watch)
                wait.look()
        with self.naming(what):
            try:
                work.wait()
            except RuntimeError as error:
                if isinstance(error, DynamixError) or (told := self._watch.told()) is None:
                    raise
                raise told from error

    def wait_here(self, work: Any, what: str = "", *, left: bool = True) -> None:
        """`wait` for a collective on CPUs, without the GIL; `left`: also ends if a rank closed its controller."""
        wait = None
        while True:
            try:
                work.wait(LOOK_EVERY)
                return
            except RuntimeError:
                if work.is_completed():
                    break  # completed meanwhile, or failed with its own error
            wait = wait or AbortableWait(self._watch, left=left)
            wait.look()
        self.wait(work, what)

    # ------------------------------------------------------------ a rank that is lost

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Inside, a failed collective raises a `WorkerLostError` that names the rank; `what`: its purpose, in words."""
        try:
            yield
        except RuntimeError as error:
            if what and failed_collective(error):
                raise self.explain(error, what) from error
            raise

    def explain(self, error: BaseException, what: str) -> WorkerLostError:
        """The error to raise if a collective for the purpose `what` has failed with `error`."""
        return self._watch.explain(error, what)

    # ------------------------------------------------------------ what all call

    def rows(self, mine: Tensor, what: str) -> Any:
        """Gather every rank's row `mine` (n,) into an array (W, n). A collective call."""
        every = mine.new_zeros(self.workers, len(mine))
        self.wait(self._control.all_gather(mine, every), what)
        return every.numpy()

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, a plain object, by rank. A collective call, named `what`."""
        self.wait_for_all(what)
        return self.of_all(value)

    def of_all(self, value: Any) -> list[Any]:
        """`gather` within a collective call that all ranks have already entered."""
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.rows(torch.tensor([len(packed)]), "")[:, 0]
        rows = self.rows(pad(packed, (0, int(lengths.max()) - len(packed))), "")
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that `facts`, plain values by name, are equal on all ranks. A collective call.

        Raises `UsageError` on every rank, which names what differs and on which ranks.
        """
        self.agreed = True
        self._watch.errors.agreeing(FIRST_PASS)
        require_same(facts, self.rows, "The ranks do not begin training with the same settings", FIXES, {})

    def forget_agreement(self) -> None:
        """The ranks' state may differ until they `agree` again. After the end no agreement is needed."""
        self.agreed = self.group is None

    def compare(self, facts: Mapping[str, Any], near: Mapping[str, float]) -> None:
        """Compare `facts` whose digests differed. A collective call; raises like `agree`, which compares all else."""
        self._watch.errors.agreeing("a comparison of settings and of the place in the data, which now differ")
        require_same(facts, self.rows, "The ranks no longer agree during training", _PARTED, near)

    def must_all_call(self, what: str) -> None:
        """All ranks must call `what`: a rank that has not, and waits elsewhere, ends the job. Returns at once."""
        self._watch.errors.agreeing(what)

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks are in the collective call `what`.

        Raises `UsageError` on every rank if some wait in another call: a later collective would never complete.
        """
        self._watch.errors.agreeing(what)
        # As long as the first row of `require_same`, because other ranks may be in that comparison.
        mine = torch.tensor([zlib.crc32(what.encode()), -1])
        if not bool((self.rows(mine, f"not all ranks came to {what}") == mine.numpy()).all()):
            raise self.end(UsageError(f"this rank waits in {what}, another one in something else: {ALIKE}"))

    # ------------------------------------------------------------ the end

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """An error inside ends ranks that then wait for this one, unless this rank continues."""
        self._watch.errors.setup_goes_on()
        try:
            yield
        except Exception as error:
            self._watch.setup_failed(error)
            raise

    def begin(self) -> None:
        """The loop begins an epoch."""

    def end(self, error: DynamixError) -> DynamixError:
        """Send `error`, which ends the job, to the other ranks, wait until they know, and return it to be raised."""
        return self._watch.end(error)

    def also_look(self, look: Look) -> None:
        """Call `look` in another thread, about once a second."""
        self._watch.also_look(look)

    def request_stop(self) -> None:
        """Ask all ranks to stop soon, after the same step."""
        self._watch.request_stop()

    def stop_after(self, steps: int) -> bool:
        """An optimizer step is done, number `steps`. Returns whether the job stops after it."""
        return self._watch.stopping.reached(steps, self._watch.require_alive)

    def release(self) -> list[dist.ProcessGroup]:
        """The process groups behind the control group; the caller owns them from now on."""
        group, self.group, self.agreed = self.group, None, True
        return [] if group is None else group.release()

    def leave(self, word: str = CLOSED) -> None:
        """Send `word` as the last message to the other ranks, and release the store; safe to call twice."""
        self._watch.leave(word)

    def leave_with(self, error: BaseException) -> None:
        """Send `error`, with which this process is about to end, to the other ranks."""
        self._watch.leave_with(error)

    def leave_unclosed(self) -> None:
        """The controller was never closed, and is collected or its process ends, possibly with an error."""
        self._watch.leave_unclosed()


class Alone(Ranks):
    """A job with a single process; every request to other ranks returns at once."""

    def __init__(self) -> None:
        self.group, self.rank, self.workers, self.agreed = None, 0, 1, True
        self._watch = RankWatch(None, 0, 1)

    def rows(self, mine: Tensor, what: str) -> Any:
        return mine.numpy()[None]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Raises `UsageError` if there are other ranks by now."""
        require_alone()
        yield

    def begin(self) -> None:
        require_alone()


ALONE = Alone()
"""The default for objects made without ranks. Nobody asks it when to stop."""
