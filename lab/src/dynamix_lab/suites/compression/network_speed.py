"""How long rounds take through an aggregator and over gloo, on the same ranks: `dynamix bench network-speed`.

All processes share this machine's loopback and cores. Times are those of the slowest rank of each round, of those the
median; contenders alternate round by round. Processor time, that of all ranks and of the aggregator, depends less on
what else runs.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dynamix.compression.wire import GroupWire, Wire
from dynamix_homomorphic.aggregator.client import Aggregator
from dynamix_homomorphic.aggregator.wire import AggregatorWire, join


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds a round: medians, and the mean processor time. `ratio` is the median of quotients, aggregator /
    gloo.
    """

    what: str
    bytes: int
    workers: int
    gloo_ms: float
    aggregator_ms: float
    ratio: float
    gloo_cpu_ms: float
    aggregator_cpu_ms: float


def measure_rounds(workers: int, elements: int, *, rounds: int = 60) -> list[RoundTimes]:
    """Sum, union and maximum as a bucket of `elements` float32 needs them; starts `workers` + 1 processes."""
    context = mp.get_context("spawn")
    command = [sys.executable, "-m", "dynamix.cli.app", "aggregator"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ranks: list[Any] = []
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        with tempfile.TemporaryDirectory() as folder:
            there, here = context.Pipe()
            for rank in range(workers):
                arguments = (rank, workers, folder, address, server.pid, elements, rounds, here if rank == 0 else None)
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


def lines(rounds: Sequence[RoundTimes]) -> list[str]:
    """For people."""
    return [
        f"{found.what:20} {found.bytes:9,} bytes, {found.workers} workers: gloo {found.gloo_ms:6.2f} ms "
        f"({found.gloo_cpu_ms:5.2f} of processors), aggregator {found.aggregator_ms:6.2f} "
        f"({found.aggregator_cpu_ms:5.2f}), ratio {found.ratio:4.2f}"
        for found in rounds
    ]


def _rank(rank: int, workers: int, folder: str, address: str, pid: int, elements: int, rounds: int, out: Any) -> None:
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
        before = _cpu_s(pid)
        times, cpu = _times(values, call, wires, rounds)
        cpu[1] += (_cpu_s(pid) - before) / rounds
        medians = (1000 * times.median(1).values).tolist()
        ratio = float((times[1] / times[0]).median())
        found.append(RoundTimes(what, values.nbytes, workers, medians[0], medians[1], ratio, *(1000 * cpu).tolist()))
    if out is not None:
        out.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _times(
    values: torch.Tensor, call: Callable[[Wire, torch.Tensor], None], wires: tuple[Wire, ...], rounds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seconds of the slowest rank, float64 (wires, rounds), and processor seconds a round of all ranks, (wires,)."""
    times = torch.zeros(len(wires), rounds, dtype=torch.float64)
    cpu = torch.zeros(len(wires), dtype=torch.float64)
    for step in range(rounds):
        for place, wire in enumerate(wires):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            call(wire, values)
            times[place, step] = time.perf_counter() - start
            cpu[place] += (time.process_time() - cpu_start) / rounds
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return times, cpu


def _cpu_s(pid: int) -> float:
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)
