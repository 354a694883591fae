"""How the ranks of a stigmergic job agree: each chooses its own size, and only the chosen sizes travel.

At the step that closes a window every rank leaves its traces in the job's store, reads the field and chooses, all in a
thread of its own. Then one asynchronous all-gather carries two whole numbers per rank: the chosen size, and the first
round that its sampler has not begun (exactly-once needs everybody's size from one agreed round on). It is taken one
step later. A rank whose thread is late sends the size it has.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import DynamixError
from dynamix.policies import Policy
from dynamix.policies.stigmergic.policy import StigmergicPolicy, in_range
from dynamix.policies.stigmergic.traces import TRACES, Own, TraceKind, noise_part
from dynamix.policies.wrappers import peers_of
from dynamix.runtime.agreement import (
    DRAIN_S,
    PATIENCE_S,
    REPLAY_PATIENCE_S,
    Channel,
    Explain,
    Kind,
    Message,
    unnamed,
)
from dynamix.runtime.control import ControlGroup, Work
from dynamix.runtime.decision import Decider
from dynamix.runtime.ending import Ending, wait_for
from dynamix.runtime.job import Closing, JobFacts
from dynamix.runtime.liveness import job_store
from dynamix.runtime.observation import ROW
from dynamix.runtime.trace_store import StoreField
from dynamix.window import Floats, Window

NOISE_DECAY = 0.8  # weight of the past windows in a rank's own part of the noise, as in `gradients.NoiseScale`
LOOK_S = 0.04  # longest time that a rank looks again for traces of this window that are not there yet
LOOK_BACK_S = 0.25  # and after the choice, so that the next one has whole traces to fall back on
LOOK_AGAIN_S = 0.002
_FAILED = -1  # sent in place of a size
_log = logging.getLogger("dynamix")


def open_channel(
    group: ControlGroup | None,
    workers: int,
    job: JobFacts,
    policy: Policy,
    decider: Decider | None,
    *,
    replays: bool,
    lr_rule: str,
) -> Channel | PeerChannel:
    """The way in which the ranks of `group` agree: a `PeerChannel` if every rank is to decide for itself.

    A recorded run that is replayed has decided already; a single rank has nobody to agree with. `decider` decides, or
    writes down what was decided: on rank 0, None on the others.
    """
    rule = None if group is None or workers < 2 or replays else peers_of(policy)
    if group is None or rule is None:
        return Channel(group, workers, decider, patience_s=REPLAY_PATIENCE_S if replays else PATIENCE_S)
    return PeerChannel(group, job, rule, decider, share_noise=lr_rule == "adascale")


class PeerChannel:
    """`Channel` for ranks that each decide for themselves: one exchange at a time over the controller's own groups.

    share_noise   send this rank's part of the noise too, so that the learning rate can follow one noise scale
                  everywhere. The rule never sees it
    fits          set by the owner: the most samples per round whose pieces this rank's memory is known to hold; None
                  while it never ran out
    """

    def __init__(
        self,
        group: ControlGroup,
        job: JobFacts,
        policy: StigmergicPolicy,
        decider: Decider | None,
        *,
        share_noise: bool,
    ) -> None:
        self.group: ControlGroup | None = group
        self.job, self.policy, self.decider, self.share_noise = job, policy, decider, share_noise
        self.rank, self.workers = group.rank, group.workers
        prefix = f"dynamix/traces/{group.name}"
        self.field = StoreField(job_store(), len(TRACES), policy.decay, prefix=prefix, patience_s=PATIENCE_S)
        self.waited_s = 0.0
        self.ending: Ending | None = None  # set by the owner
        self.failed: DynamixError | None = None
        self.explain: Explain = unnamed
        self.fits: int | None = None
        self._whole = _NONE_YET
        self._first = -1  # window in which this channel first left traces
        self._noise, self._signal = 0.0, 0.0
        self._round: _Round | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="dynamix-choose", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether a size was sent and the others' not yet taken."""
        return self._round is not None

    def send(self, row: Floats, about: Closing) -> None:
        """Choose by this rank's `row` (of `observation.ROW`), and send the choice. Returns at once."""
        self._round = _Round(self, row, about)
        self._jobs.put(self._round.run)

    def receive(self) -> Message:
        """Wait for all sizes (normally they are there) and take them. Raises `WorkerLostError` or the rule's error."""
        assert self._round is not None
        started = time.perf_counter()
        current, self._round = self._round, None
        try:
            told = current.finish()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DynamixError):
                raise
            raise self.explain(error, "the ranks could not exchange their batch sizes") from error
        finally:
            self.waited_s += time.perf_counter() - started
        if self.failed is not None:
            raise self.failed
        if len(failed := np.flatnonzero(told[:, 0] == _FAILED)):
            raise DynamixError(f"choosing a size failed on rank {failed[0]}; its own error is in that rank's output")
        message = self._message(current.closing, told)
        decider = self.decider
        if decider is not None and decider.events is not None:
            self._jobs.put(lambda: self._write_event(decider, current, message))
        return message

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until this rank's thread has nothing left to do; False if it is busy even then."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float = DRAIN_S) -> None:
        """Drain, leave the store, and end the thread, if it is not busy even then."""
        self.drain(timeout_s)
        self._jobs.put(None)
        self._thread.join(timeout_s)
        self.field.close()
        self.group = None

    def choose(self, row: Floats, closing: Closing) -> int:
        """This rank's new size; the one it has where the field does not answer. Leaves its traces."""
        own = self._steadied(own_window(row, closing, rank=self.rank, job=self.job, fits=self.fits), row, closing)
        bounds, mine = self.job.bounds, slice(self.rank, self.rank + 1)
        alone = replace(bounds, low=bounds.low[mine], high=bounds.high[mine])
        sense, left = self.policy.observe(own)
        if closing.window_index <= self._whole.step or self._first < 0:  # begun, or gone back to an earlier state
            self._whole, self._first = _NONE_YET, closing.window_index
        self._leave(left, closing.window_index)
        smelt, new, old = self._smell(closing.window_index)
        return int(self.policy.choose(own, sense, smelt[None], new[None], alone, old=old)[0])

    def _steadied(self, own: Own, row: Floats, closing: Closing) -> Own:
        """With the noise's share averaged over windows, numerator and denominator apart, as `NoiseScale` does it.

        Noise per sample is what stays while the global batch moves. (`NoiseScale` ends at 0; one rank's part need not.)
        """
        signal, total = dict(zip(ROW, row, strict=False))["global_norm_sq"], float(closing.sizes.sum())
        noise = float(own.noise[0]) * signal * total
        if np.isfinite(noise):
            weight = 1.0 if self._signal == 0.0 else 1.0 - NOISE_DECAY
            self._noise += weight * (noise - self._noise)
            self._signal += weight * (signal - self._signal)
        if self._signal <= 0.0:
            return own
        return replace(own, noise=np.array([self._noise / total / self._signal]))

    def leave_move(self, closing: Closing, size: int) -> None:
        """Traces of the change from the size in force to `size`."""
        before = closing.sizes[self.rank : self.rank + 1].astype(np.float64)
        load = before / _unit(closing, self.job)
        self._leave(self.policy.moved(before, load, np.array([size])), closing.window_index)

    def _leave(self, traces: Floats, step: int) -> None:
        cells = np.flatnonzero(traces[0])
        cells = np.append(
            cells[cells != TraceKind.PRESENT], cells[cells == TraceKind.PRESENT]
        )  # last: who sees it sees the others
        self.field.deposit(cells, traces[0][cells], step=step)

    def _smell(self, step: int) -> tuple[Floats, Floats, bool]:
        """The traces (16,), what of them is new in their window, and whether that is the window before `step`.

        They are of that window where everybody's are not there within `LOOK_S`, or before this rank has made most of
        the next step, at whose end the choice is due; unknown if that one too was not seen whole.
        """
        before, own_step_s = self._whole, float(self.policy.habit.step[0])
        if self.look(step, min(LOOK_S, 0.7 * own_step_s) if np.isfinite(own_step_s) else LOOK_S):
            return self._whole.traces, self._whole.new, False
        if before.step == step - 1 >= 0:
            return before.traces, before.new, True
        unknown = np.full(len(TRACES), np.nan)
        return unknown, unknown, False

    def look(self, step: int, patience_s: float) -> bool:
        """Whether everybody's traces of window `step` are there, now or within `patience_s`. Keeps them."""
        before, deadline = self._whole, time.perf_counter() + patience_s
        missed = range(max(step - max(before.step, self._first - 1), 1))  # windows: usually this one only
        kept = float(self.policy.decay.kept(len(missed)))
        whole = self.workers * float(self.policy.decay.kept(missed).sum())
        while before.step < step:
            traces = self.field.read(np.arange(len(TRACES)), step=step)
            new = traces - kept * before.traces
            if new[TraceKind.PRESENT] > whole - 0.5:
                self._whole = _Whole(step, traces, new)
            if not new[TraceKind.PRESENT] <= whole - 0.5 or time.perf_counter() >= deadline or not self._jobs.empty():
                break  # whole, or nobody answers, or too late
            time.sleep(LOOK_AGAIN_S)
        return self._whole.step == step

    def _message(self, closing: Closing, told: Floats) -> Message:
        """The same on every rank, being made of the same numbers."""
        job = self.job
        if self.share_noise:
            job.noise_scale.update(*noise_of(told[:, 2], told[:, 3], float(closing.sizes.sum())))
        answer = in_range(told[:, 0].astype(np.int64), job.bounds, current=closing.sizes)
        if np.array_equal(answer, closing.sizes):
            return job.keep(Kind.KEEP)
        return job.change(answer, int(told[:, 1].max()))

    def _write_event(self, decider: Decider, current: _Round, message: Message) -> None:
        closing, known = current.closing, dict(zip(ROW, current.row, strict=False))
        mine = np.arange(self.workers) == self.rank
        names = ("compute", "compute_std", "data", "loss", "accuracy", "cpu", "memory", "device")
        seen = {name: np.where(mine, known[name], np.nan) for name in names}
        steps = len(current.row) - len(ROW)
        decider.witness(Window.of(closing.sizes, **seen, steps=steps, **self.job.facts(closing)), closing, message)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the sizes are known, and training goes on with them
                _log.warning("what follows a decision has failed; training goes on", exc_info=True)
            del job  # or an idle thread would hold a process group's work


@dataclass(frozen=True, slots=True)
class _Whole:
    """The newest traces that were seen whole, and which of them were left in that window; step -1: none yet."""

    step: int
    traces: Floats
    new: Floats


_NONE_YET = _Whole(-1, np.zeros(len(TRACES)), np.zeros(len(TRACES)))


class _Round:
    """One rank's side of one decision."""

    def __init__(self, channel: PeerChannel, row: Floats, closing: Closing) -> None:
        self.channel, self.row, self.closing = channel, row, closing
        self.lock, self.posted = threading.Lock(), threading.Event()
        self.every = torch.zeros(channel.workers, 4 if channel.share_noise else 2, dtype=torch.float64)
        self.work: Work | None = None
        self.mine: Tensor | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """In the rank's own thread."""
        channel, closing = self.channel, self.closing
        try:
            size = channel.choose(self.row, closing)
        except Exception as error:  # raised again in the training thread, here and by what it sends on the others
            self.error = DynamixError(f"choosing a batch size failed: {error!r}")
            self.error.__cause__ = error
            size = _FAILED
        try:
            chosen = self._post(size)
        except (RuntimeError, ValueError) as error:  # ValueError: the job destroyed its process groups meanwhile
            self.error = self.error or error
            self.posted.set()
            return
        if chosen and size != _FAILED:
            try:
                channel.leave_move(closing, size)
                # Traces that came too late for this choice serve the next one.
                channel.look(closing.window_index, LOOK_BACK_S)
            except Exception as error:
                channel.failed = DynamixError(f"leaving or reading traces failed: {error!r}")

    def _post(self, size: int) -> bool:
        """Send `size`, unless something was sent for this window before; whether it was sent."""
        with self.lock:
            if self.work is not None:
                return False
            told = [float(size), float(self.closing.issued)]
            if self.channel.share_noise:
                known = dict(zip(ROW, self.row, strict=False))
                told += [own_noise(known, self.channel.workers), known["global_norm_sq"]]
            self.mine = torch.tensor(told, dtype=torch.float64)
            if self.channel.group is None:
                raise ValueError("the channel was closed")
            self.work = self.channel.group.all_gather(self.mine, self.every)
            self.posted.set()
            return True

    def finish(self) -> Floats:
        """What all ranks sent, (W, 2 or 4): size, first round not issued, part of the noise, |g|^2."""
        if not self.posted.wait(PATIENCE_S):
            self._post(int(self.closing.sizes[self.channel.rank]))
        if self.work is not None:
            wait_for(self.work, self.channel.ending)
        if self.error is not None:
            raise self.error
        return self.every.numpy()


def own_window(row: Floats, closing: Closing, *, rank: int, job: JobFacts, fits: int | None = None) -> Own:
    """What a rank knows by itself of the window it just closed, as arrays of shape (1,)."""
    known = dict(zip(ROW, row, strict=False))
    comm = row[len(ROW) :]
    seen = comm[np.isfinite(comm)]
    size, workers = closing.sizes[rank : rank + 1].astype(np.float64), len(closing.sizes)
    busy = known["compute"] + (known["data"] if np.isfinite(known["data"]) else 0.0)

    with np.errstate(divide="ignore", invalid="ignore"):
        jitter = np.float64(known["compute_std"]) / np.float64(known["compute"])
    alone = {"unit": _unit(closing, job), "jitter": jitter, "steps": len(comm), "noise": own_noise(known, workers)}
    alone |= {"busy": busy if busy > 0 and size[0] > 0 else np.nan, "fits": np.inf if fits is None else fits}
    alone |= {"blocked": seen.mean() if len(seen) else np.nan, "least": seen.min() if len(seen) else np.nan}
    return Own(size=size, workers=workers, **{name: np.array([v], dtype=np.float64) for name, v in alone.items()})


def own_noise(known: Mapping[str, float], workers: int) -> float:
    """A rank's part of the noise's share of |g|^2, from the fields of its row."""
    weight, local_sq, global_sq = (np.asarray(known[name]) for name in ("weight", "gradient_norm_sq", "global_norm_sq"))
    return float(noise_part(weight, local_sq, global_sq, workers))


def noise_of(parts: Floats, global_sq: Floats, total: float) -> tuple[float, float]:
    """(tr(Sigma), |G|^2) from all ranks' parts (W,) of the noise at a global batch of `total`; NaN if one is missing.

    >>> noise_of(np.array([0.25, 0.75]), np.array([2.0, 2.0]), 10.0)
    (10.0, 1.0)
    """
    noise = float(parts.mean() * global_sq.mean()) * total
    return noise, float(global_sq.mean()) - noise / total


def _unit(closing: Closing, job: JobFacts) -> float:
    """The even share of the base batch, samples per round."""
    return job.base_batch / len(closing.sizes)
