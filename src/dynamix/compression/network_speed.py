"""How long rounds take through an aggregator and over gloo, on the same ranks: `python -m dynamix.compression.speed --aggregator`.

All processes share this machine's loopback and cores, so figures are ratios within one run: of each round the time of
the slowest rank, of those the median. Contenders alternate round by round.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynamix.compression.aggregated import AggregatorWire, join
from dynamix.compression.link import Aggregator
from dynamix.compression.wire import GroupWire, Wire


@dataclass(frozen=True)
class RoundTimes:
    """Medians over rounds, in milliseconds; `ratio` is the median of their quotients, aggregator / gloo."""

    what: str
    bytes: int
    workers: int
    gloo_ms: float
    aggregator_ms: float
    ratio: float


def measure_rounds(workers: int, elements: int, *, rounds: int = 100) -> list[RoundTimes]:
    """Sum, union and maximum as a bucket of `elements` float32 needs them; starts `workers` + 1 processes."""
    context = mp.get_context("spawn")
    command = [sys.executable, "-m", "dynamix.compression.aggregator"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ranks: list[Any] = []
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        with tempfile.TemporaryDirectory() as folder:
            there, here = context.Pipe()
            for rank in range(workers):
                arguments = (rank, workers, folder, address, elements, rounds, here if rank == 0 else None)
                ranks.append(context.Process(target=_rank, args=arguments))
                ranks[-1].start()
            here.close()
            found: list[RoundTimes] = there.recv()
            for rank in ranks:
                rank.join(30)
            return found
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
        server.kill()
        server.wait()


def _rank(rank: int, workers: int, folder: str, address: str, elements: int, rounds: int, out: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=120),
    )
    group = dist.group.WORLD
    assert group is not None
    gloo = GroupWire(group, "bor")
    wires = (gloo, AggregatorWire(join(Aggregator(address), group, torch.device("cpu")), gloo))
    found = []
    header = torch.full((elements // 512 + 16,), rank, dtype=torch.uint8)
    for what, values, call in (
        ("sum, all values", torch.ones(elements, dtype=torch.int32), lambda wire, v: wire.total(v)),
        ("sum, 5 % of them", torch.ones(elements // 20, dtype=torch.int32), lambda wire, v: wire.total(v)),
        ("OR of a bitmap", torch.ones(elements // 8, dtype=torch.uint8), lambda wire, v: wire.union(v)),
        ("maximum of exponents", header, lambda wire, v: wire.maximum(v)),
        ("OR of as many bytes", header, lambda wire, v: wire.union(v)),
    ):
        times = _times(values, call, wires, rounds)
        medians = (1000 * times.median(1).values).tolist()
        ratio = float((times[1] / times[0]).median())
        found.append(RoundTimes(what, values.nbytes, workers, medians[0], medians[1], ratio))
    if out is not None:
        out.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _times(
    values: torch.Tensor, call: Callable[[Wire, torch.Tensor], None], wires: tuple[Wire, ...], rounds: int
) -> torch.Tensor:
    """Seconds of the slowest rank, float64 (wires, rounds)."""
    times = torch.zeros(len(wires), rounds + 3, dtype=torch.float64)
    for step in range(rounds + 3):  # the first warm up
        for place, wire in enumerate(wires):
            dist.barrier()
            start = time.perf_counter()
            call(wire, values)
            times[place, step] = time.perf_counter() - start
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times[:, 3:]
