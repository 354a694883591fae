"""How ranks agree: gather one row per rank, decide in one place, broadcast one message, apply it at one step.

At the step that closes a window every rank starts an asynchronous gather. On rank 0 a thread waits for it, asks the
policy and broadcasts exactly one message: a new allocation, or "keep" if the policy was late. Every rank waits for it
at its next step, or before its sampler could issue a batch that the message may affect. Rank 0's thread depends on no
rank's training step, so these waits cannot be circular.
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

# How long rank 0 delays a training step for a policy that is not done one step after it was asked.
PATIENCE_S = 0.05
# The same if a recorded decision is only looked up: a late answer would make the run differ.
REPLAY_PATIENCE_S = 30.0
# How long the end of a job waits for a busy policy, so that no line of the events file is lost.
DRAIN_S = 5.0

NOT_AGREED = "the ranks could not agree on the next allocation"
_log = logging.getLogger("dynamix")


class DecisionChannel(ABC):
    """Takes windows and returns decisions, one at a time, over the group of `ranks`.

    It has its own thread, so that no training step waits for deciding. The thread starts with the first work.

    each_decides   every rank has its own policy and decides for itself
    """

    each_decides: ClassVar[bool] = False

    def __init__(self, ranks: Ranks, thread: str) -> None:
        self.ranks, self._name, self._closed = ranks, thread, False
        self._thread: threading.Thread | None = None
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    @abstractmethod
    def send(self, row: Floats, closing: ClosedWindow) -> None:
        """Start sending this rank's row of a window. Rows have the same length on every rank. Returns at once."""

    @abstractmethod
    def receive(self) -> Message:
        """Wait for the message, which normally has arrived. Raises `WorkerLostError`, or deciding's error."""

    @property
    def group(self) -> ControlGroup:
        """The group that carries messages. Raises `ValueError` after the channel was closed."""
        if self._closed or self.ranks.group is None:
            raise ValueError("the channel was closed")
        return self.ranks.group

    def in_turn(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread, after all earlier work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._given.put(work)

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until the thread has no work left. Returns False if it is still busy after `timeout_s`."""
        done = threading.Event()
        if self._thread is not None:
            self._given.put(done.set)
        return self._thread is None or done.wait(timeout_s)

    def close(self, timeout_s: float = DRAIN_S) -> None:
        """Drain, and end the thread unless it is still busy then. The group's creator destroys the group."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._given.put(None)
            thread.join(timeout_s)
        self._closed = True

    def _serve(self) -> None:
        while (work := self._given.get()) is not None:
            write_down(work)
            del work  # otherwise an idle thread would keep a process group's work


class InPlace(DecisionChannel):
    """The channel of a single process: `decider` decides when a window is sent."""

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

    decider   on rank 0, None on the others. `decide` and the writing of events run in the thread. `JobFacts.keep`,
              which answers a window whose decision is late or failed, does not
    """

    def __init__(self, ranks: Ranks, decider: Decider | None, *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(ranks, "dynamix-decide")  # one round after another, so a late policy is never asked twice
        self._decider, self.patience_s = decider, patience_s
        self.failed: list[DynamixError] = []  # the policy's: raised now, or at the next window if this one is answered
        self._pending: tuple[Tensor, Callable[[], None]] | None = None  # the message, and a function that waits for it

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
    """Rank 0's part of one decision."""

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
            # The policy was busy with an earlier window, so this one was answered "late". It still counts for the noise
            # scale and the events.
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
        except (RuntimeError, ValueError) as error:  # ValueError: the job has destroyed its process groups
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
        channel.ranks.wait(self.gather, NOT_AGREED)  # the policy's patience must not include the wait for slow ranks
        if not self.published.wait(channel.patience_s):
            self._publish(self.decider.job.keep(Kind.LATE))
        if self.error is not None:
            raise self.error
        assert self.work is not None
        channel.ranks.wait(self.work, NOT_AGREED)


def write_down(write: Callable[[], None]) -> None:
    """Run `write` after a decision was sent. If it fails, log a warning only: training already uses the decision."""
    try:
        write()
    except Exception:
        _log.warning("dynamix: recording a decision has failed; training goes on", exc_info=True)


def ours(error: Exception, what: str) -> DynamixError:
    """A `DynamixError` that says that `what` failed; `error` itself if it is one."""
    if isinstance(error, DynamixError):
        return error
    try:
        raise DynamixError(f"{what} failed: {error!r}") from error
    except DynamixError as made:
        return made
