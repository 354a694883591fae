"""How ranks agree: gather one row each, decide in one place, broadcast one message, apply at one step.

At the step that closes a window every rank posts an asynchronous gather. On rank 0 a thread waits for it, asks the
policy and broadcasts exactly one message: a new allocation, or "keep" when the policy was late. Every rank waits for
it at its next step, or before its sampler could issue a batch that the message may concern; rank 0's thread needs
nobody's training step to go on, so no such wait can be circular.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import DynamixError
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.facts.job_facts import HEAD, ClosedWindow, Kind, Message
from dynamix.runtime.ranks.group import ControlGroup, Work
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.window import Floats

# How long rank 0 holds a training step back for a policy that is not done one step after it was asked.
PATIENCE_S = 0.05
# The same where an earlier run's answer is only looked up: answering late would make it another run.
REPLAY_PATIENCE_S = 30.0
# How long the end of a job waits for a policy that is still busy, so that no line of the events file is lost.
DRAIN_S = 5.0

NOT_AGREED = "the ranks could not agree on the next allocation"
_log = logging.getLogger("dynamix")


class DecisionChannel(ABC):
    """Takes windows and answers them, one at a time, over the group of `ranks`.

    It has a thread of its own, so that no training step waits for what decides. The thread begins with the first work.

    each_decides   every rank has a policy of its own, which decides for it
    """

    each_decides: ClassVar[bool] = False

    def __init__(self, ranks: Ranks, thread: str) -> None:
        self.ranks, self._name, self._closed = ranks, thread, False
        self._thread: threading.Thread | None = None
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    @abstractmethod
    def send(self, row: Floats, closing: ClosedWindow) -> None:
        """Post this rank's row of a window. Rows have the same length on every rank. Returns at once."""

    @abstractmethod
    def receive(self) -> Message:
        """Wait for the message (normally it is there) and take it. Raises `WorkerLostError` or what deciding raised."""

    @property
    def group(self) -> ControlGroup:
        """The group that carries messages. Raises `ValueError` once the channel is closed."""
        if self._closed or self.ranks.group is None:
            raise ValueError("the channel was closed")
        return self.ranks.group

    def in_turn(self, work: Callable[[], None]) -> None:
        """Let the thread run `work` once all before it has."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._given.put(work)

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until the thread has nothing left to do; False if it is busy even after `timeout_s`."""
        done = threading.Event()
        if self._thread is not None:
            self._given.put(done.set)
        return self._thread is None or done.wait(timeout_s)

    def close(self, timeout_s: float = DRAIN_S) -> None:
        """Drain, and end the thread, if it is not busy even then. The group is its maker's to destroy."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._given.put(None)
            thread.join(timeout_s)
        self._closed = True

    def _serve(self) -> None:
        while (work := self._given.get()) is not None:
            write_down(work)
            del work  # or an idle thread would hold a process group's work


class InPlace(DecisionChannel):
    """The channel of a process without other ranks: `decider` decides when a window is sent."""

    def __init__(self, ranks: Ranks, decider: Decider) -> None:
        super().__init__(ranks, "")
        self._decider = decider
        self._message: Message

    def send(self, row: Floats, closing: ClosedWindow) -> None:
        self._message = message = self._decider.decide(row[None], closing)
        write_down(lambda: self._decider.write_event(message))

    def receive(self) -> Message:
        return self._message


class CentralChannel(DecisionChannel):
    """One decision at a time, on rank 0.

    decider   on rank 0, None on the others. `decide` and what writes events runs in the thread; `JobFacts.keep`, which
              answers a window for which that is late or failed, does not
    """

    def __init__(self, ranks: Ranks, decider: Decider | None, *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(ranks, "dynamix-decide")  # one round after the other: a late policy is never asked twice
        self._decider, self.patience_s = decider, patience_s
        self.failed: list[DynamixError] = []  # of the policy: raised at once, or at the next window if this is answered
        self._pending: tuple[Tensor, Callable[[], None]] | None = None  # the message, and what waits until it is there

    def send(self, row: Floats, closing: ClosedWindow) -> None:
        packed = torch.from_numpy(np.ascontiguousarray(row, dtype=np.float64))
        out = torch.zeros(HEAD + self.ranks.workers, dtype=torch.float64)
        if self._decider is None:
            self._pending = out, functools.partial(self.ranks.wait, self.group.send(packed, out), NOT_AGREED)
            return
        rows = torch.zeros(self.ranks.workers, len(packed), dtype=torch.float64)
        deciding = _Round(self, self._decider, self.group.collect(packed, rows), rows, closing, out)
        self.in_turn(deciding.run)
        self._pending = out, deciding.finish

    def receive(self) -> Message:
        assert self._pending is not None
        (packed, arrive), self._pending = self._pending, None
        arrive()
        message = Message.unpack(packed)
        if message.kind is Kind.FAILED:
            raise DynamixError("the policy failed on rank 0; its own error is in that rank's output")
        return message


class _Round:
    """Rank 0's side of one decision."""

    def __init__(
        self, channel: CentralChannel, decider: Decider, gather: Work, rows: Tensor, closing: ClosedWindow, out: Tensor
    ) -> None:
        self.channel, self.decider, self.gather = channel, decider, gather
        self.rows, self.closing, self.out = rows, closing, out
        self.lock = threading.Lock()
        self.published = threading.Event()
        self.error: DynamixError | None = None
        self.work: Work | None = None

    def run(self) -> None:
        """Runs in the deciding thread."""
        channel, decider = self.channel, self.decider
        try:
            self.gather.wait()
        except RuntimeError as error:
            self.error = channel.ranks.explain(error, NOT_AGREED)
            self.published.set()
            return
        if self.published.is_set():
            # The policy was still busy with an earlier window, and this one has been answered "late": only the noise
            # scale and the events see it.
            decider.witness(decider.assemble(self.rows.numpy(), self.closing), self.closing, Message.unpack(self.out))
            return
        if not channel.failed:
            try:
                message = decider.decide(self.rows.numpy(), self.closing)
            except Exception as error:  # of any kind
                channel.failed.append(ours(error, "the policy"))
        if channel.failed:  # raised again in the training thread
            self.error, message = channel.failed[0], decider.job.keep(Kind.FAILED)
        try:
            sent = self._publish(message)
        except (RuntimeError, ValueError) as error:  # ValueError: the job destroyed its process groups meanwhile
            self.error = self.error or channel.ranks.explain(error, NOT_AGREED)
            return
        decider.write_event(sent)

    def _publish(self, message: Message) -> Message:
        with self.lock:
            if self.work is None:
                self.out.copy_(message.pack())
                self.work = self.channel.group.answer(self.out)
                self.published.set()
            return Message.unpack(self.out)

    def finish(self) -> None:
        channel = self.channel
        channel.ranks.wait(self.gather, NOT_AGREED)  # patience is for the policy, not for the slowest rank
        if not self.published.wait(channel.patience_s):
            self._publish(self.decider.job.keep(Kind.LATE))
        if self.error is not None:
            raise self.error
        assert self.work is not None
        channel.ranks.wait(self.work, NOT_AGREED)


def write_down(write: Callable[[], None]) -> None:
    """Work that follows a decision: the answer is out already, and training goes on by it whatever happens here."""
    try:
        write()
    except Exception:
        _log.warning("what follows a decision has failed; training goes on", exc_info=True)


def ours(error: Exception, what: str) -> DynamixError:
    """An error of ours that says that `what` failed; `error` itself if it is one."""
    if isinstance(error, DynamixError):
        return error
    try:
        raise DynamixError(f"{what} failed: {error!r}") from error
    except DynamixError as made:
        return made
