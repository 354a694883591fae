"""A job over threads, without a model: W ranks that plan, measure, decide, save and go on, on a clock of their own.

What a rank measures follows from what it is dealt, so a run repeats exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dynamix.data import BatchSampler, StepPlan
from dynamix.policies import Policy
from dynamix.probes.timing import CpuClock, StepTimer
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.decide.peer_channel import open_channel
from dynamix.runtime.facts.job_facts import JobFacts
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.limits import Limits
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.sync.loss_weight import LossWeight
from dynamix.window import Floats

TRANSFER_S = 0.01
NO_DEVICE = torch.device("meta")  # a recorder there looks at no host


class ToldClock(CpuClock):
    now_s = 0.0

    def mark(self) -> float:
        return self.now_s


class ThreadJob:
    """One rank's part; each thread has one.

    most         samples of a worker's round, at most
    sampling     options of the sampler
    ahead        batches that the loader asks for before they are due
    speeds       samples per second of each worker (W,); None: alike
    patience_s   how long a step waits for a policy that is late
    state        to go on from
    """

    def __init__(
        self,
        ranks: Ranks,
        policy: str | Policy = "static",
        *,
        samples: int = 400,
        batch_size: int = 4,
        most: int = 16,
        interval: int = 2,
        sampling: dict[str, Any] | None = None,
        ahead: int = 0,
        global_batch: str = "adaptive",
        speeds: Floats | None = None,
        patience_s: float = 30.0,
        lr_rule: str = "none",
        state: Any = None,
    ) -> None:
        self.ranks, self.rank, self.ahead = ranks, ranks.rank, ahead
        self.speeds = np.full(ranks.workers, 1000.0) if speeds is None else speeds
        self.clock = ToldClock()
        self.recorder = Recorder(NO_DEVICE)
        self.recorder.timer = StepTimer(NO_DEVICE, clock=self.clock)
        limits = Limits(max_batch_size=most, min_global_batch=1 if global_batch == "adaptive" else None)
        config = JobConfig(ranks.workers, policy, batch_size, global_batch, limits, interval, lr_rule=lr_rule)
        facts = JobFacts(config, hosts=tuple(f"host{rank}" for rank in range(ranks.workers)))
        decider = Decider(config.served, facts) if ranks.rank == 0 else None
        channel = open_channel(ranks, config, facts, decider, patience_s=patience_s)
        weight, self.policy = LossWeight(None, 1, ranks), config.served
        self.job = TrainingJob(config, facts, channel, weight, ranks, recorder=self.recorder)
        self.sampler = BatchSampler(samples, self.job.allocations, **(sampling or {}), **self.job.of_source())
        self.job.feed(self.sampler)
        self.plans: list[tuple[int, int, tuple[int, ...]]] = []  # round, first sample, shares: of every round done
        self.seen: list[int] = []  # samples dealt to this rank
        if state is not None:
            self.job.load_state_dict(state)

    def rounds(self, epochs: int = 1, *, first: int | None = None) -> Iterator[StepPlan]:
        """Those of the epochs before `epochs`, from the `first` or the one under way; each is done when it is given."""
        for epoch in range(self.sampler.epoch + self.sampler.finished if first is None else first, epochs):
            self.sampler.set_epoch(epoch)
            for batch in self._ahead(iter(self.sampler)):
                piece = self.sampler.piece()
                plan = piece.plan
                if not self.ranks.agreed:
                    self.job.agree()
                self.seen += batch if plan.counts[self.rank] else []
                self._measure(plan)
                self.sampler.consume()
                self.job.round_done(piece)
                self.plans.append((plan.index, plan.start, tuple(plan.counts.tolist())))
                yield plan

    def _ahead(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        asked = deque[list[int]]()
        for batch in batches:
            asked.append(batch)
            if len(asked) > self.ahead:
                yield asked.popleft()
        yield from asked

    def train(self, epochs: int = 1) -> ThreadJob:
        for _ in self.rounds(epochs):
            pass
        return self.close()

    def close(self) -> ThreadJob:
        self.job.windows.settle()
        self.job.windows.channel.close()
        return self

    def _measure(self, plan: StepPlan) -> None:
        """Every rank knows how long the slowest takes."""
        busy_s, recorder = plan.counts / self.speeds, self.recorder
        begin_s = self.clock.now_s
        recorder.timer.forward_started()
        self.clock.now_s = begin_s + float(busy_s[self.rank])
        recorder.timer.gradients_ready()
        self.clock.now_s = begin_s + float(busy_s.max()) + TRANSFER_S
        recorder.timer.reduced()
        own, total = float(plan.counts[self.rank]), float(plan.counts.sum())
        recorder.add("loss", 1.0 / (1 + plan.index), weight=max(own, 1.0))
        recorder.add("local_sq", 2.0 + 300.0 / max(own, 1.0))
        recorder.add("global_sq", 2.0 + 300.0 / total)
