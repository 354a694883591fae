"""A worker of the live half of `dynamix bench gossip`: trains apart, and meets with whoever it reaches.

Started as `python -m dynamix_lab.suites.gossip.job FOLDER` on every host; the folder's job.json holds the `GossipJob`.
Nobody is in charge: there is no process group, and any worker may be killed. A line for each meeting is written to
log/RANK.jsonl.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dynamix.window import Ints
from dynamix_lab.suites.gossip.ledger import weights
from dynamix_lab.suites.gossip.traces import CrowdMeans
from dynamix_lab.suites.gossip.wire import Contribution, PeerSockets
from dynamix_lab.tasks.base import held_out_loss
from dynamix_lab.tasks.teacher import workload

GUESS_S = 1.0  # length of a round of which nothing is known
LEAST = 4  # samples of a piece that is worth beginning
WAIT_S = 300.0  # for the others to start


@dataclass(frozen=True, slots=True)
class GossipJob:
    """What is trained, and when a round ends.

    rule        of `RULES`
    setting     seconds of a round for a deadline, pieces of a worker in it for the tracker
    addresses   of the workers
    piece       samples
    """

    rule: str
    setting: float
    addresses: tuple[str, ...]
    seed: int = 0
    piece: int = 32
    seconds: float = 40.0
    patience_s: float = 0.5
    rate: float = 0.02


class RoundRule(Protocol):
    """When a live round ends."""

    shares_end: bool

    def begin(self, number: int, meeting_s: float, speed: float) -> float:
        """A round begins after a meeting; its length in seconds, infinite where that is not known."""

    def trained(self, samples: int, seconds: float) -> None:
        """A piece was trained; `samples` of this round so far."""

    def over(self) -> bool:
        """Whether the round is over, whatever its length."""

    def tells(self, speed: float, meeting_s: float) -> tuple[float, float]:
        """What of its speed and of the last meeting goes to the next one."""

    def met(self, found: Sequence[Contribution]) -> None:
        """What was brought to a meeting."""

    def ahead(self) -> int | None:
        """Somebody who is so far ahead that this worker drops its model and takes theirs."""


class ByTraces:
    """What this suite is about: the length follows from gossiped traces, the end is the soonest that anybody knows."""

    shares_end = True

    def __init__(self, job: GossipJob, wire: PeerSockets) -> None:
        self.job, self.wire = job, wire

    def begin(self, number: int, meeting_s: float, speed: float) -> float:
        with self.wire.lock:
            if math.isfinite(meeting_s) and speed > 0:
                self.wire.traces.leave(self.wire.worker, number, speed=speed, meeting_s=meeting_s)
            crowd = self.wire.traces.crowd(number)
        return GUESS_S if crowd is None else crowd.round_seconds(self.job.piece)

    def trained(self, samples: int, seconds: float) -> None:
        """Its end is known from the beginning."""

    def over(self) -> bool:
        return False

    def tells(self, speed: float, meeting_s: float) -> tuple[float, float]:
        return speed, meeting_s

    def met(self, found: Sequence[Contribution]) -> None:
        """It knows already."""

    def ahead(self) -> int | None:
        return None


class ByDeadline(ByTraces):
    """Every round is as long as any other."""

    shares_end = False

    def begin(self, number: int, meeting_s: float, speed: float) -> float:
        return self.job.setting


class ByRiding(ByTraces):
    """The same length from sums that ride on the meeting, of who was there."""

    shares_end = False
    _crowd: CrowdMeans | None = None

    def begin(self, number: int, meeting_s: float, speed: float) -> float:
        return GUESS_S if self._crowd is None else self._crowd.round_seconds(self.job.piece)

    def met(self, found: Sequence[Contribution]) -> None:
        known = [each for each in found if math.isfinite(each.meeting_s)]
        if known:
            seen = np.mean([(each.speed, each.meeting_s) for each in known], axis=0)
            self._crowd = CrowdMeans(len(found), float(seen[0]), float(seen[1]))

    def tells(self, speed: float, meeting_s: float) -> tuple[float, float]:
        told = self._crowd
        return (speed, meeting_s) if told is None else ((speed + told.speed) / 2, (meeting_s + told.meeting_s) / 2)


class ByEnds(ByRiding):
    """The same, and the end of a round is gossiped, and nothing else."""

    shares_end = True


class ByTracker(ByTraces):
    """Hivemind's ProgressTracker, with a table that everybody has at once (hivemind/optim/progress_tracker.py)."""

    shares_end = False
    ALPHA, EXPIRES_S = 0.1, 60.0

    def __init__(self, job: GossipJob, wire: PeerSockets) -> None:
        super().__init__(job, wire)
        self.target = job.setting * job.piece * len(job.addresses)
        self._per_sample, self._pieces, self._before = 0.0, 0, 0

    def begin(self, number: int, meeting_s: float, speed: float) -> float:
        self._before = 0
        self._publish(0)
        return math.inf

    def trained(self, samples: int, seconds: float) -> None:
        self._pieces += 1
        took = seconds / max(samples - self._before, 1)
        self._before = samples
        self._per_sample = self.ALPHA * took + (1 - self.ALPHA) * self._per_sample
        self._publish(samples)

    def over(self) -> bool:
        now = time.monotonic()
        with self.wire.lock:
            table = [entry for entry in self.wire.progress.values() if now - entry.at < self.EXPIRES_S]
        number = max([self.wire.number, *[entry.number for entry in table]])
        here = [entry for entry in table if entry.number == number]
        reached = sum(entry.samples for entry in here)
        foreseen = sum(entry.samples + (now - entry.at) * entry.speed for entry in here)
        return number > self.wire.number or reached >= self.target or foreseen >= self.target

    def ahead(self) -> int | None:
        with self.wire.lock:
            table = self.wire.progress
            first = max(table, key=lambda worker: table[worker].number, default=self.wire.worker)
            lost = first in table and table[first].number > self.wire.number + 1
            return first if lost else None

    def _publish(self, samples: int) -> None:
        adjusted = self._per_sample / (1 - (1 - self.ALPHA) ** max(self._pieces, 1))
        self.wire.publish(samples, 1 / adjusted if adjusted > 0 else 0.0)


RULES: dict[str, type[ByTraces]] = {
    "gossip": ByTraces,
    "ends": ByEnds,
    "riding": ByRiding,
    "deadline": ByDeadline,
    "tracker": ByTracker,
}


class GossipWorker:
    """One worker: its model, what it has trained, and its way through rounds."""

    def __init__(self, job: GossipJob, rank: int, folder: Path) -> None:
        self.job, self.rank, self.log = job, rank, (folder / "log" / f"{rank}.jsonl").open("w", buffering=1)
        task = workload()
        self.task, self.data = task, task.make_data(job.seed)
        self.model: nn.Module = task.make_model(job.seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=job.rate, momentum=0.9)
        self.wire = PeerSockets(rank, job.addresses, seed=job.seed, shares_end=RULES[job.rule].shares_end)
        self.rule = RULES[job.rule](job, self.wire)
        self.ledger = np.zeros(len(job.addresses), dtype=np.int64)
        self.order = torch.Generator().manual_seed(1000 * job.seed + rank)
        self.speed = 0.0  # samples a second while it computes

    def run(self, began: float) -> None:
        """Train and meet until the time is over."""
        meeting_s, end = math.nan, began + self.job.seconds
        while time.monotonic() < end:
            number = self.wire.number
            length = self.rule.begin(number, meeting_s, self.speed)
            self.wire.begin(number, time.monotonic() + length)
            samples, seconds = self._train(end)
            if not self._catch_up(began, samples):
                meeting_s = self._meet(began, samples, seconds, length, meeting_s)
        self.log.write(json.dumps({"ended": True}) + "\n")

    def _train(self, end: float) -> tuple[int, float]:
        """A round; samples and seconds of computing."""
        samples, computed = 0, 0.0
        while True:
            now = time.monotonic()
            left = min(self.wire.end, end) - now
            fits = int(max(min(self.job.piece, left * (self.speed or math.inf)), 0.0))
            if samples and (fits < LEAST or self.rule.over() or self.wire.called() is not None):
                break
            size = max(fits, LEAST)
            self._piece(size)
            took = time.monotonic() - now
            samples, computed = samples + size, computed + took
            self.rule.trained(samples, took)
        # Of the whole round, which is what the next one will be like: short pieces are slower.
        self.speed = samples / computed
        return samples, computed

    def _piece(self, size: int) -> None:
        chosen = torch.randint(len(self.data.train), (size,), generator=self.order)
        inputs, targets = self.data.train.inputs[chosen], self.data.train.targets[chosen]
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.rate * size / self.job.piece
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _meet(self, began: float, samples: int, seconds: float, length: float, last_s: float) -> float:
        """Meet with whoever can be reached; seconds that it took without waiting for anybody."""
        arrived = time.monotonic()
        self.ledger[self.rank] += samples
        number = max(self.wire.number, self.wire.called() or 0)
        own = parameters_to_vector(self.model.parameters()).detach()
        told = self.rule.tells(self.speed, last_s)
        mine = Contribution(self.rank, number, self.ledger, own.numpy().tobytes(), *told)
        others = self.wire.alive()
        exchange_s = self.wire.send(mine, others)
        found = [mine, *self.wire.gathered(number, self.job.patience_s)]
        averaged = time.monotonic()
        self.wire.begin(max(number + 1, self.wire.number), math.inf)
        self._average(found)
        self.rule.met(found)
        loss = held_out_loss(self.task, self.model, self.data.test)
        meeting_s = exchange_s + time.monotonic() - averaged if others else math.nan
        about: dict[str, Any] = {"t": arrived - began, "done": time.monotonic() - began, "number": number}
        about |= {"met": sorted(each.worker for each in found), "samples": samples}
        about |= {"seconds": seconds, "length": length if math.isfinite(length) else None, "loss": loss}
        about |= {"meeting_s": meeting_s if others else None}
        about |= {"messages": self.wire.messages, "bytes": self.wire.sent_bytes}
        self.log.write(json.dumps(about) + "\n")
        return meeting_s

    def _average(self, found: list[Contribution]) -> None:
        ledgers = np.stack([each.ledger for each in found])
        mean = np.zeros(len(found[0].model) // 4)
        for part, each in zip(weights(ledgers), found, strict=True):
            mean += part * np.frombuffer(each.model, dtype=np.float32)
        self._take(mean.astype(np.float32), ledgers.max(0))

    def _take(self, parameters: NDArray[np.float32], ledger: Ints) -> None:
        vector_to_parameters(torch.from_numpy(parameters), self.model.parameters())
        self.ledger = ledger
        self.wire.keep(Contribution(self.rank, self.wire.number, ledger, parameters.tobytes()))

    def _catch_up(self, began: float, samples: int) -> bool:
        """Take the model of who is too far ahead to be met; what this worker trained since they parted is lost."""
        worker = self.rule.ahead()
        found = None if worker is None else self.wire.fetch(worker)
        if found is None:
            return False
        lost = max(int(self.ledger[self.rank] - found.ledger[self.rank]), 0)  # of what it had brought to meetings
        self._take(np.frombuffer(found.model, dtype=np.float32).copy(), found.ledger)
        self.wire.begin(found.number, math.inf)
        self.log.write(json.dumps({"t": time.monotonic() - began, "lost": lost}) + "\n")
        return True


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    given = json.loads((folder / "job.json").read_text())
    job = GossipJob(**{**given, "addresses": tuple(given["addresses"])})
    worker = GossipWorker(job, int(os.environ["RANK"]), folder)
    (folder / f"ready{worker.rank}").touch()
    until, go = time.monotonic() + WAIT_S, folder / "go"
    while not go.exists() and time.monotonic() < until:
        time.sleep(0.02)
    began = float(go.read_text())
    time.sleep(max(0.0, began - time.monotonic()))
    worker.run(began)
    worker.wire.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
