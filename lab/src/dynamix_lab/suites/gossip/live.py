"""The live half of `dynamix bench gossip`: workers on emulated hosts that are killed and cut off from each other."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import EmulationError
from dynamix_lab.emulator import Emulation, host_speeds, load_scenario
from dynamix_lab.emulator.scenario import Scenario
from dynamix_lab.suites.gossip.job import GossipJob

SPEEDS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.3)
FIXED_MS, SAMPLE_MS = 20.0, 2.5
START_S, END_S = 300.0, 20.0  # for all to start, and to end after the time is over


@dataclass(frozen=True, slots=True)
class GossipPlace:
    """Hosts, and what happens to them.

    seconds     of training
    rate        Mbit/s of every host's link, and what it is in the time `slow`
    kills       (seconds, host)
    cut         seconds from when to when hosts of odd and of even number do not reach each other
    changes     (seconds, host, new speed)
    """

    speeds: tuple[float, ...] = SPEEDS
    seconds: float = 48.0
    rate: float = 10.0
    slow_rate: float = 2.0
    slow: tuple[float, float] = (30.0, 42.0)
    kills: tuple[tuple[float, int], ...] = ((8.0, 3), (8.0, 6))
    cut: tuple[float, float] = (14.0, 24.0)
    changes: tuple[tuple[float, int, float], ...] = ((11.0, 2, 0.35), (26.0, 7, 0.6))

    def scenario(self) -> Scenario:
        """For the emulator."""
        schedule: list[dict[str, Any]] = [{"at_s": at, "host": host, "cpu": speed} for at, host, speed in self.changes]
        if self.slow[0] < self.seconds:
            rates = zip(self.slow, (self.slow_rate, self.rate), strict=True)
            schedule += [{"at_s": at, "rate_mbit_s": rate} for at, rate in rates]
        hosts = [{"cpu": speed, "rate_mbit_s": self.rate} for speed in self.speeds]
        device = {"fixed_ms": FIXED_MS, "per_sample_ms": SAMPLE_MS}
        return load_scenario(
            {"hosts": hosts, "device": device, "schedule": sorted(schedule, key=lambda change: float(change["at_s"]))}
        )

    @property
    def killed(self) -> dict[int, float]:
        """When, by host."""
        return {host: at for at, host in self.kills}

    def capacity(self, piece: int) -> float:
        """Samples that all hosts could train in whole pieces while they live, if nobody ever waited or met."""
        scenario, step = self.scenario(), 0.05
        times = np.arange(0.0, self.seconds, step)
        speeds = np.array([host_speeds(scenario, float(time)) for time in times])
        lives = np.array([self.killed.get(host, np.inf) for host in range(len(self.speeds))])
        seconds = float((speeds * (times[:, None] < lives)).sum() * step)
        return seconds * piece / ((FIXED_MS + SAMPLE_MS * piece) / 1e3)


def play_live(
    place: GossipPlace, rule: str, setting: float, folder: Path, *, seed: int = 0, keep_awake: bool = False
) -> dict[str, Any]:
    """Train under a rule; what came of it. `folder` is made, and holds the ranks' output and logs.

    Raises `EmulationError` where hosts have no network of their own, and where not all of them start.
    """
    (folder / "log").mkdir(parents=True)
    with Emulation(place.scenario(), seed=seed, run_dir=folder, keep_awake=keep_awake) as cluster:
        workers = len(place.speeds)
        if cluster.mechanisms["network"] == "loopback":
            raise EmulationError("a network that is cut needs hosts of their own: run as root")
        addresses = tuple(cluster.address(host) for host in range(workers))
        job = GossipJob(rule, setting, addresses, seed=seed, seconds=place.seconds)
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "dynamix_lab.suites.gossip.job", str(folder.resolve())]
        ranks = cluster.launch(command, env={"DYNAMIX_DEVICE_CREDIT": "0"})
        _wait_for([folder / f"ready{rank}" for rank in range(workers)], cluster)
        cluster.start_clock()
        began = time.monotonic() + 0.2
        (folder / "unfinished").write_text(repr(began))
        (folder / "unfinished").rename(folder / "go")
        _disturb(place, cluster, ranks, began)
        codes = cluster.wait(max(began + place.seconds + END_S - time.monotonic(), 1.0))
        overruns = cluster.overruns()
    late = sum(each.overruns for each in overruns) / max(sum(each.steps for each in overruns), 1)
    logs = [_lines(folder / "log" / f"{rank}.jsonl") for rank in range(workers)]
    return {**scored(place, job, logs), "codes": codes, "overruns": late}


def _wait_for(files: Sequence[Path], cluster: Emulation) -> None:
    until = time.monotonic() + START_S
    while not all(file.exists() for file in files):
        if time.monotonic() > until or any(cluster.poll()):
            raise EmulationError(f"not all workers started: {cluster.poll()}")
        time.sleep(0.05)


def _disturb(place: GossipPlace, cluster: Emulation, ranks: Sequence[Any], began: float) -> None:
    """Do what the place says, when it says so."""
    halves = [list(range(first, len(place.speeds), 2)) for first in (0, 1)]
    events: list[tuple[float, Any]] = [
        (at, lambda host=host: ranks[host].send_signal(signal.SIGKILL)) for at, host in place.kills
    ]
    if place.cut[0] < place.seconds:
        events += [(place.cut[0], lambda: cluster.partition(*halves)), (place.cut[1], cluster.partition)]
    for at, happen in sorted(events, key=lambda event: event[0]):
        time.sleep(max(0.0, began + at - time.monotonic()))
        happen()


def scored(place: GossipPlace, job: GossipJob, logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What the logs of all ranks say.

    useful     samples that came to a meeting and stayed, in parts of what hosts could have trained without waiting
    loss       held-out loss of the survivors at the end, in the mean
    losses     (seconds, loss) of every meeting, by the mean over who wrote one in the same second
    whole      seconds from the end of the cut to the first meeting of all survivors; None where there was none
    apart      how far lengths of a round were apart that workers began with, in the mean over rounds
    messages, bytes   of gossip, of a worker in a second
    """
    living = [rank for rank in range(len(place.speeds)) if rank not in place.killed]
    meetings = [dict(line, rank=rank) for rank, log in enumerate(logs) for line in log if "met" in line]
    samples = sum(_brought(log) for log in logs)
    lost = sum(line["lost"] for log in logs for line in log if "lost" in line)
    last = [line for rank in living for line in [m for m in meetings if m["rank"] == rank][-1:]]
    after = [m["done"] for m in meetings if m["t"] > place.cut[1] and set(living) <= set(m["met"])]
    return {
        "useful": (samples - lost) / place.capacity(job.piece),
        "lost": lost,
        "loss": float(np.mean([line["loss"] for line in last])) if last else None,
        "losses": [[line["done"], line["loss"]] for line in meetings if line["rank"] == living[0]],
        "whole": min(after) - place.cut[1] if after else None,
        "apart": _apart(meetings),
        "rounds": len([line for line in meetings if line["rank"] == living[0]]),
        "ended": sum(bool(log) and "ended" in log[-1] for log in logs),
        "survivors": len(living),
        "messages": sum(line["messages"] for line in last) / len(living) / place.seconds,
        "bytes": sum(line["bytes"] for line in last) / len(living) / place.seconds,
    }


def _brought(log: Sequence[Mapping[str, Any]]) -> int:
    """Samples of a worker up to the last meeting at which it was not alone."""
    meetings = [line for line in log if "met" in line]
    last = max((i for i, line in enumerate(meetings) if len(line["met"]) > 1), default=-1)
    return sum(line["samples"] for line in meetings[: last + 1])


def _apart(meetings: Sequence[Mapping[str, Any]]) -> float | None:
    by_round: dict[int, list[float]] = {}
    for line in meetings:
        if line["length"] is not None:
            by_round.setdefault(line["number"], []).append(line["length"])
    spreads = [float(np.std(lengths) / np.mean(lengths)) for lengths in by_round.values() if len(lengths) > 1]
    return float(np.mean(spreads)) if spreads else None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Without an unfinished last line, whose writer was killed."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
