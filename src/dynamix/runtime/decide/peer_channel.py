"""How the ranks of a stigmergic job agree: each chooses its own size; only traces and chosen sizes are sent.

At the step that closes a window every rank adds its traces to one small sum over all ranks, reads the field and
chooses, all in its own thread. Then one all-gather carries two integers per rank: the chosen size, and the first round
that its sampler has not begun. All sizes must apply from one agreed round, or samples would be lost or repeated. The
result is taken one step later. Every rank takes part in both, so no trace is late or lost. The thread depends on no
rank's training step, so no wait for it can be circular.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future

from dynamix.errors import DynamixError
from dynamix.policies.stigmergic.policy import StigmergicPolicy, in_range
from dynamix.policies.stigmergic.traces import TRACES, Own, noise_part
from dynamix.policies.stigmergic.worker import Sense
from dynamix.policies.wrappers import peers_of
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.channel import PATIENCE_S, REPLAY_PATIENCE_S, CentralChannel, DecisionChannel, InPlace, ours
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.facts.job_facts import ClosedWindow, JobFacts, Kind, Message
from dynamix.runtime.measure.row import HELD, ROW
from dynamix.runtime.ranks.group import Work
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.window import Floats, Window

_EXCHANGE = "the ranks could not exchange their batch sizes"
_CHOOSING = "choosing a batch size"
_FAILED = -1  # sent instead of a size


def open_channel(
    ranks: Ranks, config: JobConfig, job: JobFacts, decider: Decider | None, *, patience_s: float | None = None
) -> DecisionChannel:
    """The channel for `ranks`: a `PeerChannel` if every rank decides for itself.

    Replays are already decided, and a single rank needs no agreement. `decider`, on rank 0 and None on others, decides,
    or writes the decisions as events. patience_s: None: `PATIENCE_S`.
    """
    replays = config.replayed is not None
    rule = None if ranks.workers < 2 or replays else peers_of(config.served)
    if ranks.group is None and decider is not None:
        return InPlace(ranks, decider)
    if rule is None:
        usual_s = PATIENCE_S if patience_s is None else patience_s  # read at the call, because scripts/same changes it
        return CentralChannel(ranks, decider, patience_s=REPLAY_PATIENCE_S if replays else usual_s)
    return PeerChannel(ranks, job, rule, decider, share_noise=config.rates_follow)


@dataclass(frozen=True)
class _Choice:
    """One rank's part of one decision.

    every   what all ranks send, (W, n): size, first round not issued, perhaps two figures of the noise, and `HELD`
    made    done once `every` has arrived
    """

    row: Floats
    closing: ClosedWindow
    every: Tensor
    made: Work = field(default_factory=Future)


class PeerChannel(DecisionChannel):
    """The channel of ranks that each decide for themselves: one exchange at a time over the controller's groups.

    share_noise   also send this rank's part of the noise, so that the learning rate follows one noise scale on all
                  ranks. The rule never sees it
    """

    each_decides = True

    def __init__(
        self, ranks: Ranks, job: JobFacts, policy: StigmergicPolicy, decider: Decider | None, *, share_noise: bool
    ) -> None:
        super().__init__(ranks, "dynamix-choose")
        self.job, self.policy, self.decider, self.share_noise = job, policy, decider, share_noise
        self._pending: _Choice | None = None

    def send(self, row: Floats, closing: ClosedWindow) -> None:
        told = (4 if self.share_noise else 2) + len(HELD)
        self._pending = choice = _Choice(row, closing, torch.zeros(self.ranks.workers, told, dtype=torch.float64))
        self.in_turn(lambda: self._take_part(choice))

    def receive(self) -> Message:
        assert self._pending is not None
        choice, self._pending = self._pending, None
        self.ranks.wait(choice.made, _EXCHANGE)
        told = choice.every.numpy()
        if len(failed := np.flatnonzero(told[:, 0] == _FAILED)):
            raise DynamixError(f"choosing a size failed on rank {failed[0]}; its own error is in that rank's output")
        message = self._message(choice.closing, told)
        decider = self.decider
        if decider is not None and decider.events is not None:
            self.in_turn(lambda: self._write_event(decider, choice, message))
        return message

    def _take_part(self, choice: _Choice) -> None:
        """Runs in the rank's own thread. A rank whose rule fails still takes part, and sends `_FAILED` as its size."""
        size, failed = _FAILED, list[Exception]()
        try:
            try:
                own, sense, left = self.observe(choice.row, choice.closing)
            except Exception as error:
                failed.append(ours(error, _CHOOSING))
                self.exchange(np.zeros(len(TRACES)))
            else:
                traces = self.exchange(left)
                try:
                    size = self.choose(own, sense, traces)
                except Exception as error:
                    failed.append(ours(error, _CHOOSING))
            self._share(size, choice).wait()
        except Exception as error:
            failed.append(error)
        if failed:  # `receive` raises the first; no sizes are applied
            choice.made.set_exception(failed[0])
        else:
            choice.made.set_result(None)

    def _share(self, size: int, choice: _Choice) -> Work:
        row, told = choice.row, [float(size), float(choice.closing.issued)]
        if self.share_noise:
            known = dict(zip(ROW, row, strict=False))
            told += [own_noise(known, self.ranks.workers), known["global_norm_sq"]]
        mine = torch.tensor([*told, *row[len(ROW) - len(HELD) : len(ROW)]], dtype=torch.float64)
        return self.group.all_gather(mine, choice.every)

    def observe(self, row: Floats, closing: ClosedWindow) -> tuple[Own, Sense, Floats]:
        """Process this rank's window; returns, among others, the traces (14,) that it leaves."""
        own = own_window(row, closing, rank=self.ranks.rank, job=self.job)
        known, total = dict(zip(ROW, row, strict=False)), float(closing.sizes.sum())
        batch = known["count"] / known["weight"] if known["count"] > 0 and known["weight"] > 0 else total
        noise, square = self.policy.habit.steady(float(own.noise[0]), known["global_norm_sq"], batch, total)
        own = own if np.isnan(noise) else replace(own, noise=np.array([noise]), square=np.array([square]))
        sense, left = self.policy.observe(own)
        return own, sense, left[0]

    def exchange(self, left: Floats) -> Floats:
        """The sum of the traces (14,) that all ranks leave for this window."""
        total = torch.zeros(len(TRACES), dtype=torch.float64)
        self.group.all_sum(torch.from_numpy(left), total).wait()
        return total.numpy()

    def choose(self, own: Own, sense: Sense, traces: Floats) -> int:
        """This rank's next size, from the `traces` that `exchange` returned."""
        bounds, mine = self.job.bounds, slice(self.ranks.rank, self.ranks.rank + 1)
        alone = replace(bounds, low=bounds.low[mine], high=bounds.high[mine])
        return int(self.policy.choose(own, sense, traces[None], alone)[0])

    def _message(self, closing: ClosedWindow, told: Floats) -> Message:
        """The message; the same on every rank, because all compute it from the same numbers."""
        job = self.job
        if self.share_noise:
            job.noise_scale.update(*noise_of(told[:, 2], told[:, 3], float(closing.sizes.sum())))
        job.look(told[:, -len(HELD) :])
        answer = in_range(told[:, 0].astype(np.int64), job.bounds, current=closing.sizes)
        same = np.array_equal(answer, closing.sizes)
        message = job.keep(Kind.KEEP) if same else job.change(answer, int(told[:, 1].max()))
        return replace(message, differ=job.parting.differ())

    def _write_event(self, decider: Decider, choice: _Choice, message: Message) -> None:
        closing, known = choice.closing, dict(zip(ROW, choice.row, strict=False))
        mine = np.arange(self.ranks.workers) == self.ranks.rank
        names = ("compute", "compute_std", "data", "loss", "accuracy", "cpu", "memory", "device")
        seen = {name: np.where(mine, known[name], np.nan) for name in names}
        steps = len(choice.row) - len(ROW)
        decider.witness(Window.of(closing.sizes, **seen, steps=steps, **self.job.facts(closing)), closing, message)


def own_window(row: Floats, closing: ClosedWindow, *, rank: int, job: JobFacts) -> Own:
    """The window that this rank has just closed, from its own measurements only: arrays of shape (1,)."""
    known = dict(zip(ROW, row, strict=False))
    comm = row[len(ROW) :]
    seen = comm[np.isfinite(comm)]
    size, workers = closing.sizes[rank : rank + 1].astype(np.float64), len(closing.sizes)
    busy = known["compute"] + (known["data"] if np.isfinite(known["data"]) else 0.0)
    if known["work"] > 0:
        busy *= float(size[0]) / known["work"]

    with np.errstate(divide="ignore", invalid="ignore"):
        jitter = np.float64(known["compute_std"]) / np.float64(known["compute"])
    alone = {"unit": job.base_batch / workers, "jitter": jitter, "steps": len(comm), "noise": own_noise(known, workers)}
    alone |= {"busy": busy if busy > 0 and size[0] > 0 else np.nan, "fits": np.inf}
    alone |= {"blocked": seen.mean() if len(seen) else np.nan, "least": seen.min() if len(seen) else np.nan}
    alone |= {"square": 1.0}
    return Own(size=size, workers=workers, **{name: np.array([v], dtype=np.float64) for name, v in alone.items()})


def own_noise(known: Mapping[str, float], workers: int) -> float:
    """A rank's contribution to the noise in |g|^2, from the fields of its row."""
    weight, local_sq, global_sq = (np.asarray(known[name]) for name in ("weight", "gradient_norm_sq", "global_norm_sq"))
    return float(noise_part(weight, local_sq, global_sq, workers))


def noise_of(parts: Floats, global_sq: Floats, total: float) -> tuple[float, float]:
    """(tr(Sigma), |G|^2) from all ranks' noise contributions (W,) at a global batch of `total`; NaN if one is missing.

    >>> noise_of(np.array([0.25, 0.75]), np.array([2.0, 2.0]), 10.0)
    (10.0, 1.0)
    """
    noise = float(parts.mean() * global_sq.mean()) * total
    return noise, float(global_sq.mean()) - noise / total
