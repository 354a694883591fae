"""Randomised cases, each decoded sum against exact integers: `dynamix bench compression-cases --count 10000`.

A case draws ranks, layout, type, way, settings and a kind of gradients, and exchanges two steps of them between
threads. Every rank's decoded integers must be those that plain NumPy sums from the quantised inputs, everywhere, and
its mean must be theirs; a gathered mean must be the sum that plain NumPy forms in the order of ranks. What a rank
reduced densely instead is counted by reason and must be the dense mean, the same on every rank.

`--adversarial` draws gradients that are hard (not finite, negative zeros, ranks with everything beside ranks with
nothing, extreme magnitudes), and in a third of the cases one bit of what one rank receives is flipped. Then the result
must still be right on all ranks, or, where it was gathered, that rank must refuse it.
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

from dynamix.compression.bucket import BucketExchange, warm_up
from dynamix.compression.checks import Statistics
from dynamix.compression.gather import FLAT
from dynamix.compression.layout import Layout
from dynamix.compression.settings import ExchangeSettings
from dynamix.compression.traffic import HEADER_BYTES
from dynamix.compression.wire import LocalWire, Wire
from dynamix.errors import ConfigError, DynamixError
from dynamix_homomorphic.checks import SegmentPart
from dynamix_homomorphic.exchange import FixedPoint
from dynamix_lab.harness.suite import Tell, untold

WORKERS = (1, 2, 3, 16, 17, 32)
CHANCES = (0.2, 0.3, 0.3, 0.08, 0.06, 0.06)  # threads cost time: many ranks are drawn less often
WAYS_TRIED: tuple[str, ...] = ("gather", "blocks", "compaction", "lhc", "lhc-one-phase")
TYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
KINDS = ("random", "cancelling", "zero", "one", "all", "strided", "clustered", "tiny", "wide")
ADVERSARIAL = ("nonfinite", "signs", "ragged", "same", "cancelling", "one", "all", "strided", "tiny", "wide")
DAMAGED = 1 / 3  # of the adversarial cases
STEPS = 2  # one-phase needs a union to predict from
LARGEST = 8192  # elements outside rows


@dataclass(frozen=True)
class ExchangeCase:
    """Everything that is drawn; `seed` alone tells the rest. `rows` of `width` elements lie between single elements."""

    seed: int
    kind: str
    workers: int
    way: str
    dtype: torch.dtype
    elements: int
    rows: int
    width: int
    density: float
    damaged: bool = False

    @classmethod
    def draw(cls, seed: int, *, adversarial: bool = False) -> ExchangeCase:
        rng = np.random.default_rng([seed, 1])
        return cls(
            seed=seed,
            kind=str(rng.choice(ADVERSARIAL if adversarial else KINDS)),
            workers=int(rng.choice(WORKERS, p=CHANCES)),
            way=WAYS_TRIED[rng.integers(len(WAYS_TRIED))],
            dtype=TYPES[rng.integers(len(TYPES))],
            elements=int(math.exp(rng.uniform(0, math.log(LARGEST)))),
            rows=int(rng.integers(0, 60)) if rng.random() < 0.5 else 0,
            width=int(rng.integers(2, 80)),
            density=float(math.exp(rng.uniform(math.log(1e-3), math.log(0.5)))),
            damaged=bool(adversarial and rng.random() < DAMAGED),
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
            elif self.kind == "strided":
                stride = 2 ** (2 + self.seed % 7)
                keep = places % stride == self.seed % stride
            elif self.kind == "clustered":
                keep = places // (20 + self.seed % 200) % 7 == 0
            elif self.kind == "tiny":
                x = x * 1e-44
            elif self.kind == "wide":
                x = x * np.exp2(rng.integers(-120, 120, n))
            elif self.kind == "same":
                keep = common_keep
            elif self.kind == "ragged":
                keep[:] = rank % 3 == self.seed % 3
            elif self.kind == "signs":
                x = np.where(places % 2, x, -0.0)
            elif self.kind == "nonfinite":
                bad = (rng.random(n) < 2 / n) & (rank == self.seed % self.workers)
                x, keep = np.where(bad, rng.choice([np.nan, np.inf, -np.inf], n), x), keep | bad
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


def ordered_means(inputs: Sequence[Tensor]) -> list[NDArray[Any]]:
    """What a gathered mean may be, in the order of ranks: x / W added up, and added up within groups first."""
    wide = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    shares: list[NDArray[Any]] = [x.to(wide).numpy() / np.float32(len(inputs)) for x in inputs]
    count = math.ceil(len(inputs) / math.ceil(math.sqrt(len(inputs)))) if len(inputs) > FLAT else 1
    groups = [list(part) for part in np.array_split(np.arange(len(inputs)), count)]
    found = []
    for cut in ([list(range(len(inputs)))], groups):
        total = np.zeros_like(shares[0])
        for group in cut:
            part = np.zeros_like(shares[0])
            for rank in group:
                part = part + shares[rank]
            total = total + part
        found.append(total)
    return found


class _Damaged(LocalWire):
    """Flips one bit of the `at`-th buffer that this rank receives."""

    def __init__(self, wire: LocalWire, at: int, seed: int) -> None:
        super().__init__(wire._shared, wire.rank)
        self._left, self._rng = at, np.random.default_rng(seed)
        self.done = False

    def total(self, values: Tensor) -> None:
        super().total(values)
        self._hit(values)

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        super().union(bits, beside)
        self._hit(bits)

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        found = super().swap(parts, sizes)
        longest = max(found, key=lambda one: one.numel())
        if longest.numel() > HEADER_BYTES:
            self._hit(longest)
        return found

    def _hit(self, values: Tensor) -> None:
        if values.numel() and not self.done:
            self._left -= 1
            if self._left < 0:
                self.done = True
                values.view(torch.uint8)[int(self._rng.integers(values.nbytes))] ^= 1 << int(self._rng.integers(8))


class _Recorded(BucketExchange):
    """Keeps the integers it decoded, int64 (elements,); None after a dense exchange."""

    decoded: NDArray[np.int64] | None = None
    gathered = False

    def __init__(self, layout: Layout, *, settings: ExchangeSettings) -> None:
        super().__init__(layout, settings=settings)
        self.memories[FixedPoint] = _RecordedFixedPoint()

    def gather(self, flat: Tensor, wire: Wire, step: int) -> None:
        super().gather(flat, wire, step)
        self.gathered = True

    def add_blocks(self, flat: Tensor, wire: Wire, step: int) -> None:
        super().add_blocks(flat, wire, step)
        self.gathered = True


class _RecordedFixedPoint(FixedPoint):
    def learn(
        self, bucket: BucketExchange, union: Tensor, codes: Tensor, parts: list[SegmentPart], way: str, flat: Tensor
    ) -> None:
        assert isinstance(bucket, _Recorded)
        whole = np.zeros(bucket.layout.elements, dtype=np.int64)
        for s, part in zip(bucket.layout.segments, parts, strict=True):
            whole[s.start : s.stop].reshape(-1, s.width)[part.items.numpy()] = part.values.view(-1, s.width).numpy()
        bucket.decoded = whole
        super().learn(bucket, union, codes, parts, way, flat)


@dataclass
class Outcome:
    """Of one case: exchanges decoded or gathered, sketches that did not and went by compaction, dense ones by reason,
    messages that were refused, what was wrong.
    """

    decoded: int = 0
    gathered: int = 0
    refused: int = 0
    undecoded: int = 0
    dense: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def run_case(case: ExchangeCase, pool: ThreadPoolExecutor) -> Outcome:
    """Exchange the case's steps between its ranks, threads of `pool`, and compare."""
    layout, outcome = case.layout, Outcome()
    wires = LocalWire.make(case.workers, timeout_s=60)
    # Where a message that came is not the last one, who refuses it leaves the others waiting: not in a pool of threads.
    refusing = case.way in ("gather", "blocks")
    hit = case.damaged and case.workers > 1 and case.way != "blocks" and (not refusing or case.workers <= FLAT)
    if hit:
        victim = case.seed % case.workers
        wires[victim] = _Damaged(wires[victim], 0 if refusing else case.seed % 3, case.seed)
    ranks = [_Recorded(layout, settings=ExchangeSettings(seed=case.seed)) for _ in wires]
    statistics = [Statistics() for _ in wires]
    for step in range(STEPS):
        inputs = case.gradients(step)
        results = [x.clone() for x in inputs]

        def exchange(rank: int, step: int = step, results: list[Tensor] = results) -> bool:
            """Whether what came was refused."""
            ranks[rank].decoded, ranks[rank].gathered = None, False
            try:
                ranks[rank].reduce_(results[rank], case.way, wires[rank], step=step, statistics=statistics[rank])
            except DynamixError:
                return True
            return False

        if case.workers == 1:
            refused = [exchange(0)]
        else:
            refused = [future.result() for future in [pool.submit(exchange, rank) for rank in range(case.workers)]]
        if any(refused):
            outcome.refused += 1
            if not hit or refused.index(True) != case.seed % case.workers or sum(refused) > 1:
                outcome.wrong.append(f"step {step}: refused by {refused}")
            if not torch.equal(results[refused.index(True)].nan_to_num(), inputs[refused.index(True)].nan_to_num()):
                outcome.wrong.append(f"step {step}: something of a refused message was applied")
            return outcome
        _judge(outcome, f"step {step}", inputs, results, ranks)
    outcome.dense.update(statistics[0].dense_after)
    outcome.undecoded = statistics[0].undecoded
    if len({_counted(one) for one in statistics}) > 1:
        outcome.wrong.append("ranks counted different doubts")
    return outcome


def _counted(statistics: Statistics) -> str:
    """What ranks must count alike: all but the bytes of what each brought to a gather."""
    return str({name: value for name, value in statistics.as_dict().items() if name != "payload_bytes"})


def _judge(
    outcome: Outcome, when: str, inputs: Sequence[Tensor], results: Sequence[Tensor], ranks: Sequence[_Recorded]
) -> None:
    if not all(_same(result, results[0]) for result in results):
        outcome.wrong.append(f"{when}: ranks differ")
    if len({rank.decoded is None for rank in ranks}) > 1:
        outcome.wrong.append(f"{when}: some ranks decoded, others went dense")
    if ranks[0].gathered:
        outcome.gathered += 1
        wanted = [torch.from_numpy(one).to(inputs[0].dtype) for one in ordered_means(inputs)]
        if not any(_same(results[0], one) for one in wanted):
            outcome.wrong.append(f"{when}: the gathered mean differs from the reference")
        return
    if ranks[0].decoded is None:
        want = torch.stack([x.double() for x in inputs]).mean(0)
        finite = want[torch.isfinite(want)]
        scale = float(finite.abs().max()) if finite.any() else 1.0
        rounding = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(inputs[0].dtype, 1e-5)
        limits = torch.finfo(inputs[0].dtype)
        rounding = max(rounding, len(inputs) * limits.eps / 2)  # each addition rounds, and equal ones all the same way
        least = 2 * len(inputs) * limits.tiny * limits.eps  # each rank's share is rounded, subnormals to whole ones
        if not torch.allclose(results[0].double(), want, rtol=rounding, atol=rounding * scale + least, equal_nan=True):
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


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit but for the sign of zeros and the kind of NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(1.0, 2.0, 3.0), other.nan_to_num(1.0, 2.0, 3.0)
    )


def run_cases(count: int, *, seed: int = 0, adversarial: bool = False, tell: Tell = untold) -> dict[str, Any]:
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
            case = ExchangeCase.draw(number, adversarial=adversarial)
            found = run_case(case, pool)
            total.decoded += found.decoded
            total.gathered += found.gathered
            total.refused += found.refused
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
        "adversarial": adversarial,
        "decoded": total.decoded,
        "gathered": total.gathered,
        "refused": total.refused,
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
        f"{found['exchanges']} exchanges: {found['decoded']} decoded, equal to the integer sums unless named below; "
        f"{found['gathered']} gathered, equal to the ordered sums; {found['refused']} refused as they were damaged",
        f"by compaction, as the sketch did not decode: {found['undecoded']}",
        f"dense instead, by way and reason: {found['dense_after'] or 'none'}",
        f"drawn: {found['drawn']}",
        *[f"FAILED {failure}" for failure in found["failures"]],
    ]
