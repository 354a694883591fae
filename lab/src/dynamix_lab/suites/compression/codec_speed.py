"""How fast one core encodes and decodes, and how near the bytes come to the bound: `dynamix bench codec-speed`.

One rank alone, so the wire costs nothing: a round is scan, agreement, index, encode, decode and all checks. Throughput
is dense bytes per second of this thread's CPU time, the best of the rounds (on a busy machine the wall clock shows
the other processes). The bound is index entropy plus values, H(p) + 32 p bits an element at
density p (a row of an embedding has one index bit).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dynamix.compression.bucket import BucketExchange, warm_up
from dynamix.compression.checks import Statistics
from dynamix.compression.layout import Layout
from dynamix.compression.wire import LocalWire
from dynamix_lab.harness.suite import Tell, untold

WAYS_MEASURED: tuple[str, ...] = ("compaction", "lhc", "lhc-one-phase")


@dataclass(frozen=True)
class CodecCase:
    """`width` 1: single elements at random; above: whole rows of an embedding."""

    elements: int
    density: float
    width: int = 1


@dataclass(frozen=True)
class CodecFigures:
    """gigabytes_s: dense bytes over time; over_bound: bytes over (entropy + values); of_dense: bytes over dense
    bytes.
    """

    way: str
    case: CodecCase
    gigabytes_s: float
    over_bound: float
    of_dense: float


def bound_bytes(case: CodecCase) -> float:
    """Entropy of the index plus four bytes a value.

    >>> round(bound_bytes(CodecCase(1000, 0.05)))
    236
    """
    p, items = case.density, case.elements // case.width
    entropy = -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)
    return items * (entropy + 32 * p * case.width) / 8


def gradients(case: CodecCase, seed: int = 0) -> Tensor:
    """float32 (elements,): normal values at items drawn without replacement."""
    generator = torch.Generator().manual_seed(seed)
    items = case.elements // case.width
    chosen = torch.randperm(items, generator=generator)[: round(case.density * items)]
    values = torch.zeros(items, case.width)
    values[chosen] = torch.randn(len(chosen), case.width, generator=generator)
    return values.view(-1)


def measure(way: str, case: CodecCase, *, rounds: int = 40) -> CodecFigures:
    """Encode and decode one bucket `rounds` times."""
    layout = Layout.of([(case.elements // case.width, case.width)])
    exchange = BucketExchange(layout)
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
    return CodecFigures(way, case, flat.nbytes / min(times[2:]) / 1e9, sent / bound_bytes(case), sent / flat.nbytes)


def codec_speeds(elements: int, *, tell: Tell = untold) -> list[dict[str, Any]]:
    """`CodecFigures` of every case and way as dicts, on one thread."""
    torch.set_num_threads(1)
    warm_up()
    cases = [*(CodecCase(elements, p) for p in (0.01, 0.05, 0.2)), CodecCase(elements, 0.05, width=64)]
    each = [(way, case) for case in cases for way in WAYS_MEASURED]
    found = []
    for i, (way, case) in enumerate(each):
        tell(way, i / len(each))
        found.append(asdict(measure(way, case)))
    return found


def lines(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """For people."""
    return [
        f"{f['way']:14} density {f['case']['density']:5.0%} width {f['case']['width']:3}: "
        f"{f['gigabytes_s']:6.2f} GB/s, {f['over_bound']:5.2f} x bound, {f['of_dense']:6.1%} of dense"
        for f in figures
    ]
