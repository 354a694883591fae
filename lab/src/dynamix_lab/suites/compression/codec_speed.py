"""How fast one core encodes and decodes, and how near the bytes come to the bound: `python -m dynamix_lab.suites.compression.codec_speed`.

One rank alone, so the wire costs nothing: a round is scan, agreement, index, encode, decode and all checks. Throughput
is dense bytes per second of this thread's CPU time, the best of the rounds (on a busy machine the wall clock shows
the other processes). The bound is index entropy plus values, H(p) + 32 p bits an element at
density p (a row of an embedding has one index bit).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dynamix.compression.bucket import BucketExchange, ExchangeSettings, Way, warm_up
from dynamix.compression.checks import Statistics
from dynamix.compression.layout import Layout
from dynamix.compression.wire import LocalWire

WAYS_MEASURED: tuple[Way, ...] = ("compaction", "lhc", "lhc-one-phase")


@dataclass(frozen=True)
class Case:
    """`width` 1: single elements at random; above: whole rows of an embedding."""

    elements: int
    density: float
    width: int = 1
    lanes: int = 1


@dataclass(frozen=True)
class Figures:
    """gigabytes_s: dense bytes over time; over_bound: bytes over (entropy + values); of_dense: bytes over dense bytes."""

    way: str
    case: Case
    gigabytes_s: float
    over_bound: float
    of_dense: float


def bound_bytes(case: Case) -> float:
    """Entropy of the index plus four bytes a value.

    >>> round(bound_bytes(Case(1000, 0.05)))
    236
    """
    p, items = case.density, case.elements // case.width
    entropy = -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)
    return items * (entropy + 32 * p * case.width) / 8


def gradients(case: Case, seed: int = 0) -> Tensor:
    """float32 (elements,): normal values at items drawn without replacement."""
    generator = torch.Generator().manual_seed(seed)
    items = case.elements // case.width
    chosen = torch.randperm(items, generator=generator)[: round(case.density * items)]
    values = torch.zeros(items, case.width)
    values[chosen] = torch.randn(len(chosen), case.width, generator=generator)
    return values.view(-1)


def measure(way: Way, case: Case, *, rounds: int = 40) -> Figures:
    """Encode and decode one bucket `rounds` times."""
    layout = Layout.of([(case.elements // case.width, case.width)])
    exchange = BucketExchange(layout, settings=ExchangeSettings(lanes=case.lanes))
    wire, statistics, flat = LocalWire.make(1)[0], Statistics(), gradients(case)
    times, sent = [], 0
    for step in range(rounds + 2):  # two to learn the index's depth and the union's size
        before = wire.payload_bytes
        start = time.thread_time()
        exchange.reduce_(flat, way, wire, step=step, statistics=statistics)
        times.append(time.thread_time() - start)
        sent = wire.payload_bytes - before
    if statistics.dense_after:
        raise RuntimeError(f"{way} went dense: {dict(statistics.dense_after)}")
    return Figures(way, case, flat.nbytes / min(times[2:]) / 1e9, sent / bound_bytes(case), sent / flat.nbytes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dynamix_lab.suites.compression.codec_speed", description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 20, help="float32 elements of the bucket")
    parser.add_argument(
        "--aggregator", action="store_true", help="time rounds through an aggregator and over gloo instead"
    )
    parser.add_argument("--workers", type=int, default=4, help="ranks, with --aggregator")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    if options.aggregator:
        _print_rounds(options)
        return
    torch.set_num_threads(1)
    warm_up()
    n = options.elements
    cases = [Case(n, p) for p in (0.01, 0.05, 0.2)] + [Case(n, 0.05, lanes=1024), Case(n, 0.05, width=64)]
    for case in cases:
        for way in WAYS_MEASURED:
            if case.lanes > 1 and way == "compaction":
                continue
            found = measure(way, case)
            if options.json:
                print(json.dumps(asdict(found)))
            else:
                print(
                    f"{way:14} density {case.density:5.0%} width {case.width:3} lanes {case.lanes:4}: "
                    f"{found.gigabytes_s:6.2f} GB/s, {found.over_bound:5.2f} x bound, {found.of_dense:6.1%} of dense"
                )


def _print_rounds(options: argparse.Namespace) -> None:
    from dynamix_lab.suites.compression.network_speed import measure_rounds

    for found in measure_rounds(options.workers, options.elements):
        if options.json:
            print(json.dumps(asdict(found)))
        else:
            print(
                f"{found.what:20} {found.bytes:9,} bytes, {found.workers} workers: gloo {found.gloo_ms:6.2f} ms "
                f"({found.gloo_cpu_ms:5.2f} of processors), aggregator {found.aggregator_ms:6.2f} "
                f"({found.aggregator_cpu_ms:5.2f}), ratio {found.ratio:4.2f}"
            )


if __name__ == "__main__":
    main()
