"""The other ranks of a job, as its parts know them: waits that can be given up, comparisons, errors that reach all."""

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
    **dict.fromkeys(PLACE, "Train every batch that the loader gives, on every rank, and load one state on all"),
}


class Ranks:
    """Those of a controller's own `group`. `rank` is this one's number among `workers`.

    agreed   whether they have compared what they hold, since the start or the last load
    """

    group: ControlGroup | None

    def __init__(self, group: ControlGroup, watch: RankWatch) -> None:
        self.group, self.rank, self.workers, self.agreed = group, group.rank, group.workers, False
        self._control, self._watch = group, watch

    @property
    def lost(self) -> WorkerLostError | None:
        """The error that was raised for a lost rank."""
        return self._watch.lost

    # ------------------------------------------------------------ waits

    def wait(self, work: Any, what: str = "") -> None:
        """`work.wait()` of a collective, or of the future of one, given up where another rank ends the job.

        what   it is for, in words: where it fails, a `WorkerLostError` then names the rank
        """
        future = isinstance(work, torch._C.Future)  # what a hook returns need be no `torch.futures.Future`
        if not (work.done() if future else work.is_completed()):
            arrived = threading.Event()
            # On CUDA it is there at once, as for `work.wait()`: neither waits for the device.
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

    def wait_here(self, work: Any, what: str = "") -> None:
        """`wait` for a collective on CPUs: no other thread of this process needs Python's lock meanwhile."""
        wait = None
        while True:
            try:
                work.wait(LOOK_EVERY)
                return
            except RuntimeError:
                if work.is_completed():
                    break  # meanwhile, or with an error of its own
            wait = wait or AbortableWait(self._watch)
            wait.look()
        self.wait(work, what)

    # ------------------------------------------------------------ a rank that is lost

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Inside, a failed collective becomes a `WorkerLostError` that names the rank: `what` it was for, in words."""
        try:
            yield
        except RuntimeError as error:
            if what and failed_collective(error):
                raise self.explain(error, what) from error
            raise

    def explain(self, error: BaseException, what: str) -> WorkerLostError:
        """The error to raise if a collective, which was for `what`, has failed with `error`."""
        return self._watch.explain(error, what)

    # ------------------------------------------------------------ what all call

    def rows(self, mine: Tensor, what: str) -> Any:
        """Every rank's row `mine` (n,), as an array (W, n). A collective call."""
        every = mine.new_zeros(self.workers, len(mine))
        self.wait(self._control.all_gather(mine, every), what)
        return every.numpy()

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, a plain object, by rank. A collective call, named `what`."""
        self.wait_for_all(what)
        return self.of_all(value)

    def of_all(self, value: Any) -> list[Any]:
        """`gather` in a collective call to which all ranks have come."""
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.rows(torch.tensor([len(packed)]), "")[:, 0]
        rows = self.rows(pad(packed, (0, int(lengths.max()) - len(packed))), "")
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def of_first(self, value: Any) -> Any:
        """The first rank's `value`, a plain object, as `of_all`."""
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([len(packed)])
        self.wait(self._control.broadcast(length))
        packed = packed if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
        self.wait(self._control.broadcast(packed))
        return pickle.loads(packed.numpy().tobytes())

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts`, plain values by name. A collective call.

        Raises `UsageError` on every rank, naming what differs, by rank.
        """
        self.agreed = True
        self._watch.errors.agreeing(FIRST_PASS)
        require_same(facts, self.rows, "The ranks do not begin training with the same settings", FIXES)

    def forget_agreement(self) -> None:
        """The ranks may hold unlike things from now on, until they `agree` again; nobody is asked after the end."""
        self.agreed = self.group is None

    def compare(self, facts: Mapping[str, Any], near: Mapping[str, float]) -> None:
        """Compare `facts`, whose digests were not alike. A collective call; raises as `agree`, which says the rest."""
        self._watch.errors.agreeing("a comparison of settings and of the place in the data, which now differ")
        require_same(facts, self.rows, "The ranks no longer agree during training", _PARTED, near)

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks are in the collective call `what`.

        Raises `UsageError` on every rank if some wait for something else instead: a later collective would not end.
        """
        self._watch.errors.agreeing(what)
        # As long as the first row of `require_same`: what the others are in may be that comparison.
        mine = torch.tensor([zlib.crc32(what.encode()), -1])
        if not bool((self.rows(mine, f"not all ranks came to {what}") == mine.numpy()).all()):
            raise self.end(UsageError(f"this rank waits in {what}, another one in something else: {ALIKE}"))

    # ------------------------------------------------------------ the end

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """An error inside ends the ranks that then wait for this one, unless it goes on."""
        self._watch.errors.setup_goes_on()
        try:
            yield
        except Exception as error:
            self._watch.setup_failed(error)
            raise

    def begin(self) -> None:
        """The loop begins an epoch."""

    def end(self, error: DynamixError) -> DynamixError:
        """Tell the other ranks of `error`, which ends the job, stay until they know, and return it, to be raised."""
        return self._watch.end(error)

    def also_look(self, look: Look) -> None:
        """Call `look` about once a second, in another thread."""
        self._watch.also_look(look)

    def request_stop(self) -> None:
        """Ask all ranks to stop after the same step, soon."""
        self._watch.request_stop()

    def stop_after(self, steps: int) -> bool:
        """An optimizer step is over, `steps` in all: whether the job stops after it."""
        return self._watch.stopping.reached(steps, self._watch.require_alive)

    def release(self) -> list[dist.ProcessGroup]:
        """The process groups behind the control group, which are the caller's now."""
        group, self.group, self.agreed = self.group, None, True
        return [] if group is None else group.release()

    def leave(self, word: str = CLOSED) -> None:
        """Say goodbye to the other ranks with `word`, and let go of the store; safe to call twice."""
        self._watch.leave(word)

    def leave_with(self, error: BaseException) -> None:
        """Tell the other ranks of `error`, with which this process is about to end."""
        self._watch.leave_with(error)

    def leave_unclosed(self) -> None:
        """Nobody has closed the controller, and it is collected or its process ends: perhaps with an error."""
        self._watch.leave_unclosed()


class Alone(Ranks):
    """Nobody else is there; whatever is asked of the others is answered at once."""

    def __init__(self) -> None:
        self.group, self.rank, self.workers, self.agreed = None, 0, 1, True
        self._watch = RankWatch(None, 0, 1)

    def rows(self, mine: Tensor, what: str) -> Any:
        return mine.numpy()[None]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Raises `UsageError` if there are others by now."""
        require_alone()
        yield

    def begin(self) -> None:
        require_alone()


ALONE = Alone()
"""For what is made without ranks, and never asked when to stop."""
