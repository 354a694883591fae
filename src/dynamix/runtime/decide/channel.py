"""How ranks agree: gather one row each, decide in one place, broadcast one message, apply at one step.

At the step that closes a window every rank posts an asynchronous gather. On rank 0 a thread waits for it, asks the
policy and broadcasts exactly one message: a new allocation, or "keep" when the policy was late. Every rank waits for
it at its next step, or before its sampler could issue a batch that the message may concern; rank 0's thread needs
nobody's training step to go on, so no such wait can be circular.
"""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import DynamixError
from dynamix.runtime.decide.in_turn import InTurn, write_down
from dynamix.runtime.ranks.group import ControlGroup, Work
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.window import Floats, Ints

# How long rank 0 holds a training step back for a policy that is not done one step after it was asked.
PATIENCE_S = 0.05
# The same where an earlier run's answer is only looked up: answering late would make it another run.
REPLAY_PATIENCE_S = 30.0
# How long the end of a job waits for a policy that is still busy, so that no line of the events file is lost.
DRAIN_S = 5.0

NOT_AGREED = "the ranks could not agree on the next allocation"
_HEAD = 7  # numbers of a message before its sizes


class Kind(enum.IntEnum):
    """What a message says. LATE and FAILED keep the allocation; FAILED ends the job on every rank."""

    KEEP = 0
    NEW = 1
    LATE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Message:
    """The one message of a window, the same on every rank."""

    kind: Kind
    from_step: int  # round at which `sizes` come into force (NEW)
    noise: float
    signal: float
    sizes: Ints  # samples per round
    interval: int = 0  # steps of the next window; 0: as many as of this one
    piece: int = 0  # samples of a worker's own step, where workers step apart in rounds of `sizes`
    differ: bool = False  # digests of what ranks hold alike were not: all compare what they are of

    def pack(self) -> Tensor:
        head = [
            float(self.kind),
            float(self.from_step),
            self.noise,
            self.signal,
            float(self.interval),
            float(self.piece),
            float(self.differ),
        ]
        return torch.tensor(np.concatenate([head, self.sizes.astype(np.float64)]), dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> Message:
        kind, from_step, noise, signal, interval, piece, differ = packed[:_HEAD].tolist()
        sizes = packed[_HEAD:].numpy().astype(np.int64)
        return cls(Kind(int(kind)), int(from_step), noise, signal, sizes, int(interval), int(piece), bool(differ))


class Judge(Protocol):
    """Who decides, on rank 0: `dynamix.runtime.decide.decision.Decider`. All but `keep` run in a thread of their own.

    decide(rows, about)         the gathered rows (W, n), and what rank 0 sent `about` them, to the message
    keep(kind)                  the message to send when that is late or failed
    write_event(message)        once the message of `decide` is out
    skip(rows, about, message)  in place of both, for a window that was answered "late" because the policy was still
                                busy with an earlier one
    """

    def decide(self, rows: Floats, about: Any, /) -> Message: ...
    def keep(self, kind: Kind, /) -> Message: ...
    def write_event(self, message: Message, /) -> None: ...
    def skip(self, rows: Floats, about: Any, message: Message, /) -> None: ...


class DecisionChannel:
    """One decision at a time over the group of `ranks` (where they have none it is made in place), of all `workers`."""

    def __init__(self, ranks: Ranks, workers: int, judge: Judge | None, *, patience_s: float = PATIENCE_S) -> None:
        self.ranks, self.workers, self._judge, self.patience_s = ranks, workers, judge, patience_s
        self.group: ControlGroup | None = ranks.group
        self.rank = ranks.rank
        self.waited_s = 0.0
        self.failed: DynamixError | None = None
        self._deciding = InTurn("dynamix-decide")  # one round after the other: a late policy is never asked twice
        self._pending: Tensor | None = None
        self._receive: Work | None = None
        self._round: _Round | None = None

    @property
    def judge(self) -> Judge:
        """Who decides; on rank 0 only."""
        assert self._judge is not None, f"rank {self.rank} does not decide"
        return self._judge

    @property
    def pending(self) -> bool:
        """Whether a window was sent and its message not yet taken."""
        return self._pending is not None

    def send(self, row: Floats, about: Any = None) -> None:
        """Post this rank's row. Rows have the same length on every rank. Returns at once."""
        if self.group is None:
            message = self.judge.decide(row[None], about)
            self._pending = message.pack()
            write_down(lambda: self.judge.write_event(message))
            return
        packed = torch.from_numpy(np.ascontiguousarray(row, dtype=np.float64))
        self._pending = torch.zeros(_HEAD + self.workers, dtype=torch.float64)
        if self.rank == 0:
            rows = torch.zeros(self.workers, len(packed), dtype=torch.float64)
            self._round = _Round(self, self.group.collect(packed, rows), rows, about, self._pending)
            self._deciding.run(self._round.run)
        else:
            self._receive = self.group.send(packed, self._pending)

    def receive(self) -> Message:
        """Wait for the message (normally it is there) and take it. Raises `WorkerLostError` or the policy's error."""
        assert self._pending is not None
        started = time.perf_counter()
        try:
            if self._round is not None:
                self._round.finish()
            elif self._receive is not None:
                self.ranks.wait(self._receive, NOT_AGREED)
        finally:
            packed, self._pending, self._receive, self._round = self._pending, None, None, None
            self.waited_s += time.perf_counter() - started
        message = Message.unpack(packed)
        if message.kind is Kind.FAILED:
            raise DynamixError("the policy failed on rank 0; its own error is in that rank's output")
        return message

    def fails(self, error: DynamixError) -> None:
        """The policy has failed: `error` is raised here, or at the next window if this one was answered already."""
        self.failed = error

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until rank 0's thread has nothing left to do; False if it is busy even after `timeout_s`."""
        return self._deciding.drain(timeout_s)

    def close(self, timeout_s: float = DRAIN_S) -> None:
        """Drain, and end rank 0's thread, if it is not busy even then. The group is its maker's to destroy."""
        self._deciding.end(timeout_s)
        self.group = None


class _Round:
    """Rank 0's side of one decision."""

    def __init__(self, channel: DecisionChannel, gather: Work, rows: Tensor, about: Any, out: Tensor) -> None:
        self.channel, self.gather, self.rows, self.about, self.out = channel, gather, rows, about, out
        self.lock = threading.Lock()
        self.published = threading.Event()
        self.error: DynamixError | None = None
        self.work: Work | None = None

    def run(self) -> None:
        """In the deciding thread."""
        try:
            self.gather.wait()
        except RuntimeError as error:
            self.error = self.channel.ranks.explain(error, NOT_AGREED)
            self.published.set()
            return
        if self.published.is_set():
            # The policy was still busy with an earlier window, and this one has been answered "late".
            write_down(lambda: self.channel.judge.skip(self.rows.numpy(), self.about, Message.unpack(self.out)))
            return
        try:
            if self.channel.failed is not None:
                raise self.channel.failed
            message = self.channel.judge.decide(self.rows.numpy(), self.about)
        except Exception as error:  # whatever the policy raised is raised again, in the training thread
            self.error = error if isinstance(error, DynamixError) else caused_by(error, f"the policy failed: {error!r}")
            self.channel.fails(self.error)
            message = self.channel.judge.keep(Kind.FAILED)
        try:
            sent = self._publish(message)
        except (RuntimeError, ValueError) as error:  # ValueError: the job destroyed its process groups meanwhile
            self.error = self.error or self.channel.ranks.explain(error, NOT_AGREED)
            return
        write_down(lambda: self.channel.judge.write_event(sent))

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
        self.channel.ranks.wait(self.gather, NOT_AGREED)  # patience is for the policy, not for the slowest rank
        if not self.published.wait(self.channel.patience_s):
            self._publish(self.channel.judge.keep(Kind.LATE))
        if self.error is not None:
            raise self.error
        assert self.work is not None
        self.channel.ranks.wait(self.work, NOT_AGREED)


def caused_by(error: Exception, said: str) -> DynamixError:
    """An error of ours that says so, caused by one of whatever kind."""
    ours = DynamixError(said)
    ours.__cause__ = error
    return ours
