"""Randomised cases, each decoded sum against exact integers: `dynamix bench compression-cases --count 10000`.

A case draws ranks, layout, type, way, settings and a kind of gradients, and exchanges two steps of them between
threads. Every rank's decoded integers must be those that plain NumPy sums from the quantised inputs, everywhere, and
its mean must be theirs. What a rank reduced densely instead is counted by reason and must be the dense mean, the same
on every rank.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamix.compression.bucket import BucketExchange, Way, warm_up
from dynamix.compression.checks import Part, Statistics
from dynamix.compression.layout import Layout
from dynamix.compression.sketch import ExchangeSettings
from dynamix.compression.wire import LocalWire
from dynamix.errors import ConfigError
from dynamix_lab.harness.suite import Tell, untold

WORKERS = (1, 2, 3, 16, 17, 32)
CHANCES = (0.2, 0.3, 0.3, 0.08, 0.06, 0.06)  # threads cost time: many ranks are drawn less often
WAYS_TRIED: tuple[Way, ...] = ("compaction", "lhc", "lhc-one-phase")
TYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
KINDS = ("random", "cancelling", "zero", "one", "all", "lanes", "clustered", "tiny", "wide")
STEPS = 2  # one-phase needs a union to predict from
LARGEST = 8192  # elements outside rows


@dataclass(frozen=True)
class ExchangeCase:
    """Everything that is drawn; `seed` alone tells the rest. `rows` of `width` elements lie between single elements."""

    seed: int
    kind: str
    workers: int
    way: Way
    dtype: torch.dtype
    elements: int
    rows: int
    width: int
    density: float
    lanes: int

    @classmethod
    def draw(cls, seed: int) -> ExchangeCase:
        rng = np.random.default_rng([seed, 1])
        return cls(
            seed=seed,
            kind=str(rng.choice(KINDS)),
            workers=int(rng.choice(WORKERS, p=CHANCES)),
            way=WAYS_TRIED[rng.integers(len(WAYS_TRIED))],
            dtype=TYPES[rng.integers(len(TYPES))],
            elements=int(math.exp(rng.uniform(0, math.log(LARGEST)))),
            rows=int(rng.integers(0, 60)) if rng.random() < 0.5 else 0,
            width=int(rng.integers(2, 80)),
            density=float(math.exp(rng.uniform(math.log(1e-3), math.log(0.5)))),
            lanes=int(rng.choice([1, 1, 64, 1024])),
        )

    @property
    def layout(self) -> Layout:
        return Layout.of([(self.elements, 1), (self.rows, self.width), (3, 1)])

    def gradients(self, step: int) -> list[Tensor]:
        """One (elements,) a rank; other values and places at every step, except that structure stays."""
        n = self.layout.elements
        rng = np.random.default_rng([self.seed, 2, step])
        places = np.arange(n)
        common, common_keep = rng.standard_normal(n), rng.random(n) < self.density
        found = []
        for rank in range(self.workers):
            x, keep = rng.standard_normal(n), rng.random(n) < self.density
            if self.kind == "cancelling":  # pairs of ranks cancel exactly; an odd one is left over
                x, keep = common * (-1) ** rank, common_keep
            elif self.kind == "zero":
                keep[:] = False
            elif self.kind == "one":
                keep[:] = False
                keep[self.seed % n] = rank == self.seed % self.workers
            elif self.kind == "all":
                keep[:] = True
            elif self.kind == "lanes":
                stride = 2 ** (2 + self.seed % 7)
                keep = places % stride == self.seed % stride
            elif self.kind == "clustered":
                keep = places // (20 + self.seed % 200) % 7 == 0
            elif self.kind == "tiny":
                x = x * 1e-44
            elif self.kind == "wide":
                x = x * np.exp2(rng.integers(-120, 120, n))
            found.append(_as(torch.from_numpy(np.where(keep, x, 0.0)), self.dtype))
        return found


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else values.to(dtype)


def integer_sums(inputs: Sequence[Tensor], layout: Layout) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The definition, independent of the exchange: integers (elements,) and the size of one, 2^(e - s), at each
    element.

    s = 30 - ceil(log2 W); e is the exponent of a block's largest magnitude over ranks, at least -125.
    """
    stack = np.stack([x.double().numpy() for x in inputs])
    s = 30 - math.ceil(math.log2(len(inputs)))
    sums = np.zeros(stack.shape[1], dtype=np.int64)
    quantum = np.zeros(stack.shape[1])
    for segment in layout.segments:
        size = segment.width << segment.shift
        for low in range(segment.start, segment.stop, size):
            part = slice(low, min(low + size, segment.stop))
            largest = np.abs(stack[:, part]).max()
            if largest == 0:
                continue
            exponent = max(int(np.frexp(largest)[1]), -125)
            sums[part] = np.rint(np.ldexp(stack[:, part], s - exponent)).astype(np.int64).sum(0)
            quantum[part] = np.ldexp(1.0, exponent - s)
    return sums, quantum


class _Recorded(BucketExchange):
    """Keeps the integers it decoded, int64 (elements,); None after a dense exchange."""

    decoded: NDArray[np.int64] | None = None

    def _learn(self, union: Tensor, codes: Tensor, parts: list[Part], way: Way) -> None:
        whole = np.zeros(self.layout.elements, dtype=np.int64)
        for s, part in zip(self.layout.segments, parts, strict=True):
            whole[s.start : s.stop].reshape(-1, s.width)[part.items.numpy()] = part.values.view(-1, s.width).numpy()
        self.decoded = whole
        super()._learn(union, codes, parts, way)


@dataclass
class Outcome:
    """Of one case: exchanges decoded, sketches that did not and went by compaction, dense ones by reason, what was
    wrong.
    """

    decoded: int = 0
    undecoded: int = 0
    dense: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def run_case(case: ExchangeCase, pool: ThreadPoolExecutor) -> Outcome:
    """Exchange the case's steps between its ranks, threads of `pool`, and compare."""
    layout, outcome = case.layout, Outcome()
    wires = LocalWire.make(case.workers, timeout_s=60)
    ranks = [_Recorded(layout, settings=ExchangeSettings(seed=case.seed, lanes=case.lanes)) for _ in wires]
    statistics = [Statistics() for _ in wires]
    for step in range(STEPS):
        inputs = case.gradients(step)
        results = [x.clone() for x in inputs]

        def exchange(rank: int, step: int = step, results: list[Tensor] = results) -> None:
            ranks[rank].decoded = None
            ranks[rank].reduce_(results[rank], case.way, wires[rank], step=step, statistics=statistics[rank])

        if case.workers == 1:
            exchange(0)
        else:
            for future in [pool.submit(exchange, rank) for rank in range(case.workers)]:
                future.result()
        _judge(outcome, f"step {step}", inputs, results, ranks)
    outcome.dense.update(statistics[0].dense_after)
    outcome.undecoded = statistics[0].undecoded
    if any(other.as_dict() != statistics[0].as_dict() for other in statistics):
        outcome.wrong.append("ranks counted different doubts")
    return outcome


def _judge(
    outcome: Outcome, when: str, inputs: Sequence[Tensor], results: Sequence[Tensor], ranks: Sequence[_Recorded]
) -> None:
    if not all(torch.equal(result, results[0]) for result in results):
        outcome.wrong.append(f"{when}: ranks differ")
    if len({rank.decoded is None for rank in ranks}) > 1:
        outcome.wrong.append(f"{when}: some ranks decoded, others went dense")
    if ranks[0].decoded is None:
        want = torch.stack([x.double() for x in inputs]).mean(0)
        scale = float(want.abs().max()) or 1.0
        rounding = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(inputs[0].dtype, 1e-5)
        limits = torch.finfo(inputs[0].dtype)
        least = 2 * len(inputs) * limits.tiny * limits.eps  # each rank's share is rounded, subnormals to whole ones
        if not torch.allclose(results[0].double(), want, rtol=rounding, atol=rounding * scale + least):
            outcome.wrong.append(f"{when}: the dense mean is wrong")
        return
    outcome.decoded += 1
    sums, quantum = integer_sums(inputs, ranks[0].layout)
    if not all(rank.decoded is not None and np.array_equal(rank.decoded, sums) for rank in ranks):
        outcome.wrong.append(f"{when}: integers differ from the reference")
    mean = torch.from_numpy(sums * quantum / len(inputs))
    wide = mean if inputs[0].dtype == torch.float64 else mean.float().to(inputs[0].dtype)
    if not torch.equal(results[0], wide):
        outcome.wrong.append(f"{when}: the mean differs from the reference")


def run_cases(count: int, *, seed: int = 0, tell: Tell = untold) -> dict[str, Any]:
    """Cases `seed`, `seed + 1`, ...; how many, what failed, and what went dense. Raises `ConfigError` for a count below
    1.
    """
    if count < 1:
        raise ConfigError("count", count, "1 or more", "check the argument")
    torch.set_num_threads(1)
    warm_up()
    began, total = time.monotonic(), Outcome()
    by: dict[str, Counter[str]] = {"kind": Counter(), "workers": Counter(), "way": Counter(), "dtype": Counter()}
    failures = []
    with ThreadPoolExecutor(max(WORKERS), thread_name_prefix="rank") as pool:
        for number in range(seed, seed + count):
            case = ExchangeCase.draw(number)
            found = run_case(case, pool)
            total.decoded += found.decoded
            total.undecoded += found.undecoded
            total.dense.update({f"{case.way}: {reason}": times for reason, times in found.dense.items()})
            if found.wrong:
                failures.append({"case": {**asdict(case), "dtype": str(case.dtype)}, "wrong": found.wrong})
            for name, counter in by.items():
                counter[str(getattr(case, name)).removeprefix("torch.")] += 1
            tell(f"{number - seed + 1} cases, {len(failures)} failed", (number - seed + 1) / count)
    return {
        "cases": count,
        "seed": seed,
        "failed": len(failures),
        "exchanges": count * STEPS,
        "decoded": total.decoded,
        "undecoded": total.undecoded,
        "dense_after": dict(sorted(total.dense.items())),
        "drawn": {name: dict(sorted(c.items())) for name, c in by.items()},
        "failures": failures[:20],
        "seconds": round(time.monotonic() - began, 1),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """For people."""
    return [
        f"{found['cases']} cases from seed {found['seed']}, {found['failed']} failed, in {found['seconds']} s",
        f"{found['exchanges']} exchanges: {found['decoded']} decoded, equal to the integer sums unless named below",
        f"by compaction, as the sketch did not decode: {found['undecoded']}",
        f"dense instead, by way and reason: {found['dense_after'] or 'none'}",
        f"drawn: {found['drawn']}",
        *[f"FAILED {failure}" for failure in found["failures"]],
    ]
