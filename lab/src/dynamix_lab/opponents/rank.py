"""One rank of live runs of opponents: `python -m dynamix_lab.opponents.rank CONFIG.json`, with torchrun's environment.

It makes one run after another in one process. It reports to the parent over a Unix socket, which works across network
namespaces.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dynamix_lab.harness.channel import JobChannel
from dynamix_lab.harness.reference import references
from dynamix_lab.opponents.live import RunObserver, run_rank
from dynamix_lab.opponents.runs import RunLimits
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.tasks import make_workload

PROGRESS_S = 0.5  # between two reports


class ParentObserver(RunObserver):
    """Reports a run's progress to the parent; `number` counts the runs of this process."""

    def __init__(self, link: JobChannel, number: int) -> None:
        self.link, self.number = link, number
        self.began = self._told_s = 0.0

    def start(self) -> None:
        ask(self.link, "start", run=self.number)
        self.began = time.monotonic()

    def clock(self) -> float:
        """Seconds since the run began; 0 before that."""
        return time.monotonic() - self.began if self.began else 0.0

    def met(self, time_s: float, samples: int, loss: float) -> None:
        if time_s - self._told_s >= PROGRESS_S:
            self._told_s = time_s
            self.link.send("progress", run=self.number)


def ask(link: JobChannel, kind: str, **fields: Any) -> None:
    """Send a message and wait for the answer "go"."""
    link.send(kind, **fields)
    while (answer := link.receive()) is None or answer["kind"] != "go":
        pass


def main(path: str) -> None:
    """Make one run after another, as the parent asks for them. The parent ends this process."""
    config = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    link = JobChannel.connect(config["socket"])
    link.send("hello", rank=rank)
    timeout = datetime.timedelta(seconds=config["timeout_s"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, workers, is_master=rank == 0, timeout=timeout)
    workload = make_workload(config["workload"])
    data = workload.make_data(config["seed"])
    limits = RunLimits(**config["limits"])
    while True:
        if (entry := link.receive()) is None:
            continue
        number = entry["number"]
        began = ParentObserver(link, number)
        others = references(config["scenario"], seed=config["disturbance_seed"], clock=began.clock)
        group = PrefixStore(f"run {number}", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=workers, timeout=timeout)
        try:
            run = run_rank(
                Trial.from_dict(entry["trial"]),
                workload,
                data,
                seed=config["seed"],
                limits=limits,
                observer=began,
                others=others,
                fastest=config["fastest"],
                events=Path(config["events"]) / entry["events"],
            )
        finally:
            dist.destroy_process_group()
        if run is not None:
            ask(link, "finished", run=number, result=run.to_dict())


if __name__ == "__main__":
    main(sys.argv[1])
