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
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import DynamixError
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.decide.job_facts import HEAD, ClosedWindow, Kind, Message
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


class Channel:
    """What windows are sent to and answered by, over the group of `ranks`.

    It has a thread of its own, so that no training step waits for what decides. The thread begins with the first work.
    """

    def __init__(self, ranks: Ranks, thread: str) -> None:
        self.ranks = ranks
        self.group: ControlGroup | None = ranks.group
        self._name = thread
        self._thread: threading.Thread | None = None
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

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
        self.group = None

    def _serve(self) -> None:
        while (work := self._given.get()) is not None:
            write_down(work)
            del work  # or an idle thread would hold a process group's work


class DecisionChannel(Channel):
    """One decision at a time. If the ranks have no group it is made in place.

    decider   on rank 0, None on the others. `decide` and what writes events runs in the thread; `JobFacts.keep`, which
              answers a window for which that is late or failed, does not
    """

    def __init__(self, ranks: Ranks, decider: Decider | None, *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(ranks, "dynamix-decide")  # one round after the other: a late policy is never asked twice
        self._decider, self.patience_s = decider, patience_s
        self.failed: DynamixError | None = None
        self._pending: tuple[Tensor, Callable[[], None]] | None = None  # the message, and what waits until it is there

    def send(self, row: Floats, closing: ClosedWindow) -> None:
        """Post this rank's row. Rows have the same length on every rank. Returns at once."""
        decider, group = self._decider, self.group
        if group is None:
            assert decider is not None
            message = decider.decide(row[None], closing)
            self._pending = message.pack(), lambda: None
            write_down(lambda: decider.write_event(message))
            return
        packed = torch.from_numpy(np.ascontiguousarray(row, dtype=np.float64))
        out = torch.zeros(HEAD + self.ranks.workers, dtype=torch.float64)
        if decider is None:
            self._pending = out, functools.partial(self.ranks.wait, group.send(packed, out), NOT_AGREED)
            return
        rows = torch.zeros(self.ranks.workers, len(packed), dtype=torch.float64)
        deciding = _Round(self, decider, group.collect(packed, rows), rows, closing, out)
        self.in_turn(deciding.run)
        self._pending = out, deciding.finish

    def receive(self) -> Message:
        """Wait for the message (normally it is there) and take it. Raises `WorkerLostError` or the policy's error."""
        assert self._pending is not None
        (packed, arrive), self._pending = self._pending, None
        arrive()
        message = Message.unpack(packed)
        if message.kind is Kind.FAILED:
            raise DynamixError("the policy failed on rank 0; its own error is in that rank's output")
        return message

    def fails(self, error: DynamixError) -> None:
        """The policy has failed: `error` is raised here, or at the next window if this one was answered already."""
        self.failed = error


class _Round:
    """Rank 0's side of one decision."""

    def __init__(
        self, channel: DecisionChannel, decider: Decider, gather: Work, rows: Tensor, closing: ClosedWindow, out: Tensor
    ) -> None:
        self.channel, self.decider, self.gather = channel, decider, gather
        self.rows, self.closing, self.out = rows, closing, out
        self.lock = threading.Lock()
        self.published = threading.Event()
        self.error: DynamixError | None = None
        self.work: Work | None = None

    def run(self) -> None:
        """In the deciding thread."""
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
        try:
            if channel.failed is not None:
                raise channel.failed
            message = decider.decide(self.rows.numpy(), self.closing)
        except Exception as error:  # whatever the policy raised is raised again, in the training thread
            self.error = error if isinstance(error, DynamixError) else caused_by(error, f"the policy failed: {error!r}")
            channel.fails(self.error)
            message = decider.job.keep(Kind.FAILED)
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
                if self.channel.group is None:
                    raise ValueError("the channel was closed")
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
    """What follows a decision: the answer is out, and training goes on by it, whatever becomes of this."""
    try:
        write()
    except Exception:
        _log.warning("what follows a decision has failed; training goes on", exc_info=True)


def caused_by(error: Exception, said: str) -> DynamixError:
    """An error of ours that says so, caused by one of whatever kind."""
    ours = DynamixError(said)
    ours.__cause__ = error
    return ours
