"""The choice of a way: right, alike on all ranks, and cheap. Times here are given, not measured."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.compression.auto import Chooser
from dynamix.compression.spread import Spread
from dynamix.compression.traffic import traffic
from dynamix.compression.ways import registry
from dynamix.errors import ConfigError

CANDIDATES = registry().candidates  # four with dynamix-homomorphic, two without
WAYS = ("dense", *CANDIDATES)


class Link:
    """Costs by the model of bytes and hops, with computing beside them, in seconds."""

    def __init__(self, spread: Spread, *, byte_s: float, hop_s: float, computing: dict[str, float]) -> None:
        self.spread, self.byte_s, self.hop_s, self.computing = spread, byte_s, hop_s, computing

    def cost(self, way: str) -> float:
        dense = traffic("dense", self.spread)
        sent = traffic(way, self.spread)
        if self.full(way):  # then it goes dense, after its header
            sent = dense
        return sent.seconds(byte_s=self.byte_s, hop_s=self.hop_s) + self.computing[way]

    def full(self, way: str) -> bool:
        return way in ("gather", "blocks") and traffic(way, self.spread).bytes > traffic("dense", self.spread).bytes


def _run(links: Callable[[int], Link], steps: int, ranks: int = 2, noise: float = 0.0) -> tuple[list[str], float]:
    """The ways taken, and the time over that of the best at each step. Rank 1 sees half as much again.

    What of a gradient is zero is seen by ways that look, not by a dense step.
    """
    choosers, rng = [Chooser() for _ in range(ranks)], random.Random(0)
    ways, taken, best = [], 0.0, 0.0
    seen: Spread | None = None
    for step in range(steps):
        link = links(step)
        plans = {chooser.next() for chooser in choosers}
        assert len(plans) == 1, "ranks must take the same way"
        way, timed = plans.pop()
        due, seconds = choosers[0].due, link.cost(way) * (1 + noise * rng.random())
        seen = seen if way == "dense" else dataclasses.replace(link.spread)
        for rank, chooser in enumerate(choosers):
            chooser.record(seconds * (1 + 0.5 * rank) if timed else None, full=link.full(way))
        if due:
            speeds = [(link.hop_s * (1 + rank), link.byte_s * (1 + rank)) for rank in range(ranks)]
            left = min(link.spread.union_bytes / link.spread.dense_bytes, 1.0) if choosers[0].full else 1.0
            reports = [c.report(hop_s=h, byte_s=b, filled=left) for c, (h, b) in zip(choosers, speeds, strict=True)]
            least = [min(column) for column in zip(*reports, strict=True)]
            for chooser in choosers:
                chooser.agree(least, seen)
        ways.append(way)
        taken += seconds
        best += min(link.cost(one) for one in WAYS) * (1 + noise / 2)
    return ways, taken / best


def _spread(own: float, union: float, workers: int = 4, dense: int = 1_000_000) -> Spread:
    return Spread([round(own * dense)] * workers, round(union * dense), dense)


FREE = dict.fromkeys(WAYS, 0.0)


@given(
    dense=st.sampled_from([10**6, 2 * 10**7]),
    own=st.floats(1e-4, 0.99),
    overlap=st.floats(0, 1),
    workers=st.sampled_from([2, 4, 8, 16]),
    byte_s=st.sampled_from([1e-7, 1e-8, 1e-9]),
    hop_s=st.sampled_from([3e-5, 5e-4]),
    computing=st.tuples(*[st.floats(0, 2e-9)] * len(CANDIDATES)),
)
@settings(max_examples=60, deadline=None)
def test_a_run_takes_at_most_five_percent_longer_than_the_best_way(
    dense: int, own: float, overlap: float, workers: int, byte_s: float, hop_s: float, computing: tuple[float, ...]
) -> None:
    union = min(own * (overlap + workers * (1 - overlap)), 1.01)
    computed = {"dense": 0.0, **{way: c * dense for way, c in zip(CANDIDATES, sorted(computing), strict=True)}}
    link = Link(_spread(own, union, workers, dense), byte_s=byte_s, hop_s=hop_s, computing=computed)
    _, ratio = _run(lambda step: link, 1000, noise=0.02)
    assert ratio < 1.05


@pytest.mark.parametrize("slower", [True, False])
def test_links_that_change_are_noticed(slower: bool) -> None:
    """Where bytes are cheap, computing decides for dense."""
    computing = {"dense": 0.0, "gather": 0.01, "blocks": 0.02, "compaction": 0.02, "lhc": 0.04}
    fast = Link(_spread(0.1, 0.3), byte_s=1e-9, hop_s=1e-5, computing=computing)
    slow = Link(_spread(0.1, 0.3), byte_s=1e-7, hop_s=1e-5, computing=computing)
    ways, _ = _run(lambda step: slow if (step >= 400) == slower else fast, 1000)
    early, late = ("dense", "gather") if slower else ("gather", "dense")
    assert ways[399] == early
    assert ways[520:].count(late) > 430


def test_gradients_that_fill_up_are_noticed() -> None:
    empty = Link(_spread(0.01, 0.03), byte_s=1e-7, hop_s=1e-5, computing=FREE)
    full = Link(_spread(1.0, 1.0), byte_s=1e-7, hop_s=1e-5, computing=FREE)
    ways, ratio = _run(lambda step: full if step >= 400 else empty, 1000)
    assert ways[399] == "gather"
    assert ratio < 1.05


@pytest.mark.parametrize("was", [(1.0, 1.0), (0.6, 0.7)])  # full for all ways, and for a gather alone
@pytest.mark.parametrize("now", [(0.01, 0.04), (0.05, 0.05), (0.1, 0.3)])
@pytest.mark.parametrize("last", [560, 700])
def test_a_full_bucket_is_asked_again_once_it_is_not(was: Sequence[float], now: Sequence[float], last: int) -> None:
    full, empty = (Link(_spread(*at), byte_s=1e-7, hop_s=1e-5, computing=FREE) for at in (was, now))
    ways, _ = _run(lambda step: full if step < last else empty, 1500)
    best = min(map(empty.cost, WAYS))
    assert {full.full("gather"), "gather" in ways[last - 32 : last]} == {True, False}
    assert all(empty.cost(way) < 1.03 * best for way in ways[last + 96 :])


def test_a_bucket_that_stays_as_full_is_not_asked_more_often() -> None:
    full = Link(_spread(0.9, 1.0), byte_s=1e-7, hop_s=1e-5, computing=FREE)
    ways, _ = _run(lambda _: full, 2000)
    assert len(ways) - ways.count("dense") < 30


def test_a_way_that_went_dense_is_never_taken_for_a_lucky_time() -> None:
    """Where nothing is zero a gather is a header and a dense step: what it saves is chance."""
    full = Link(_spread(1.0, 1.0), byte_s=1e-9, hop_s=1e-5, computing=FREE)
    ways, _ = _run(lambda _: full, 2000, noise=1.0)
    assert ways[:2] == ["gather"] * 2
    assert ways[2:].count("gather") + ways.count("blocks") < 20


def test_budget_is_a_share() -> None:
    with pytest.raises(ConfigError, match="budget=0"):
        Chooser(budget=0)
