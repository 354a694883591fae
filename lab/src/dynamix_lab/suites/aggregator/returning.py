"""What it costs a job that its aggregator is lost and comes back: two ranks that train without a pause.

The aggregator is killed after a third of the time and started again after another. Lost is what the step in which ranks
found out, and the step in which they joined again, took beyond the median of their way; and, where the process group is
the slower way, what the steps took on it after the aggregator was back.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dynamix.compression import CompressionState, compression_hook
from dynamix.errors import DynamixError
from dynamix_homomorphic import Aggregator

RANKS, FEATURES = 2, 512
MOST_S = 120.0  # for it to be joined again


def returning(seconds: float) -> dict[str, Any]:
    """Seconds lost, and their share of a run of about so many seconds; raises `DynamixError` where it is not joined."""
    context = mp.get_context("spawn")
    server, address = _start("0")
    ranks: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for rank in range(RANKS):
                ranks.append(context.Process(target=_train, args=(rank, str(folder), address, seconds)))
                ranks[-1].start()
            _until(folder / "lose", ranks)
            server.kill()
            server.communicate()
            _until(folder / "return", ranks)
            server, _ = _start(address.rpartition(":")[2])
            (folder / "returned").touch()
            _until(folder / "measured.json", ranks)
            for rank in ranks:
                rank.join(60)
            found: dict[str, Any] = json.loads((folder / "measured.json").read_text())
            if not found["rejoined"]:
                raise DynamixError(f"the aggregator was not joined again within {MOST_S:.0f} s")
            return found
        finally:
            server.kill()
            server.communicate()
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()


def _start(port: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "dynamix.cli.app", "aggregator", "--port", port]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip().rpartition(" ")[2]


def _until(file: Path, ranks: list[Any]) -> None:
    while not file.exists():
        if any(rank.exitcode for rank in ranks):
            raise DynamixError("a rank failed while its aggregator came and went")
        time.sleep(0.01)


def _train(rank: int, folder: str, address: str, seconds: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    torch.manual_seed(0)
    model = DDP(nn.Linear(FEATURES, FEATURES))
    state = CompressionState("compaction", model=model.module, aggregator=Aggregator(address, timeout_s=60))
    model.register_comm_hook(state, compression_hook)
    steps = _steps(rank, Path(folder), model, state, seconds)
    if rank == 0:
        unfinished = Path(folder) / "unfinished"
        unfinished.write_text(json.dumps(summary(steps)))
        unfinished.replace(Path(folder) / "measured.json")
    dist.barrier()
    dist.destroy_process_group()


def _steps(rank: int, folder: Path, model: nn.Module, state: CompressionState, seconds: float) -> list[dict[str, Any]]:
    """Of each step: its time, what was counted in it, and whether the aggregator was there at its end."""
    inputs, began, steps = torch.randn(64, FEATURES), time.monotonic(), list[dict[str, Any]]()
    joined_s = float("inf")
    while True:
        now, there = time.monotonic() - began, True
        if rank == 0 and now > seconds / 3:
            (folder / "lose").touch()
            there = (folder / "returned").exists()
        if rank == 0 and now > 2 * seconds / 3:
            (folder / "return").touch()
        before, started = (state.statistics.lost, state.statistics.rejoined), time.perf_counter()
        model(inputs).square().mean().backward()
        model.zero_grad()
        took = time.perf_counter() - started
        lost, joined = state.statistics.lost, state.statistics.rejoined
        step = {"s": took, "lost": lost - before[0], "rejoined": joined - before[1], "there": there}
        steps.append({**step, "away": lost > joined})
        joined_s = min(joined_s, now) if joined else joined_s
        ended = torch.tensor([int(now > min(max(seconds, joined_s + seconds / 3), seconds + MOST_S))])
        dist.all_reduce(ended, op=dist.ReduceOp.MAX)
        if ended.item():
            return steps


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run lost.

    >>> def step(s, lost=0, rejoined=0, away=False, there=True):
    ...     return {"s": s, "lost": lost, "rejoined": rejoined, "away": away, "there": there}
    >>> run = [step(1.0)] * 3 + [step(4.0, lost=1, away=True)] + [step(2.0, away=True)] * 3 + [step(3.0, rejoined=1)]
    >>> found = summary(run)
    >>> found["lost_s"], found["share"], found["steps_until_joined"]
    (8.0, 0.5, 4)
    """
    usual = {
        away: statistics.median([s["s"] for s in steps if s["away"] == away and not (s["lost"] or s["rejoined"])])
        for away in (False, True)
    }
    found_out = sum(s["s"] - usual[False] for s in steps if s["lost"])
    joined = sum(s["s"] - usual[True] for s in steps if s["rejoined"])
    late = sum(s["away"] and s["there"] for s in steps)
    whole = sum(s["s"] for s in steps)
    lost_s = found_out + joined + late * max(usual[True] - usual[False], 0.0)
    return {
        "steps": len(steps),
        "seconds": round(whole, 3),
        "aggregator_step_s": round(usual[False], 6),
        "group_step_s": round(usual[True], 6),
        "loss_s": round(found_out, 4),
        "joining_s": round(joined, 4),
        "steps_until_joined": late,
        "lost_s": round(lost_s, 4),
        "share": round(max(lost_s, 0.0) / whole, 5),
        "lost": sum(s["lost"] for s in steps),
        "rejoined": sum(s["rejoined"] for s in steps),
    }
