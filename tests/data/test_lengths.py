"""Rounds that are cut by what samples cost: the same samples, each once, and costs in proportion to shares."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.data import Allocations, BatchSampler
from dynamix.data.lengths import SampleCosts
from dynamix.errors import ConfigError, StateError
from tests.data.test_data import Job, seen

SETTINGS = settings(max_examples=60, deadline=None)
NO_BOUNDS: dict[str, Any] = {"low": np.array([0]), "high": np.array([2**40])}


def lognormal(count: int, seed: int, sigma: float = 1.0) -> np.ndarray:
    return np.exp(sigma * np.random.default_rng(seed).normal(size=count))


@st.composite
def jobs(draw: Any) -> dict[str, Any]:
    workers, samples = draw(st.integers(1, 5)), draw(st.integers(125, 300))
    sizes = draw(st.lists(st.integers(0, 12), min_size=workers, max_size=workers).filter(any))
    costs = SampleCosts(
        lognormal(samples, draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.5, 2.0]))),
        samples,
        padded=draw(st.booleans()),
    )
    accumulate = draw(st.sampled_from([1, 1, 2]))
    return {"size": samples, "sizes": sizes, "costs": costs, "accumulate": accumulate}


@SETTINGS
@given(jobs(), st.integers(1, 5), st.integers(1, 8))
def test_every_sample_once_over_a_resume_at_another_world_size(job: dict[str, Any], workers: int, steps: int) -> None:
    options = {"costs": job["costs"], "accumulate": job["accumulate"]}
    plain = Job(job["size"], job["sizes"], accumulate=job["accumulate"])
    before = Job(job["size"], job["sizes"], **options)
    done, as_plain = (each.run(steps * job["accumulate"]) for each in (before, plain))
    for (plan, used), (_, other) in zip(done, as_plain, strict=True):  # each round has the samples that it would have
        assert sorted(seen([(plan, used)])) == sorted(seen([(plan, other)]))
        assert plan.round.work is not None
        assert plan.round.work.shape == plan.round.counts.shape
        assert all(count or not size for count, size in zip(plan.counts, job["sizes"], strict=True) if plan.regular)
    after = Job(
        job["size"], [max(sum(job["sizes"]) // workers, 1)] * workers, before.samplers[0].state_dict(), **options
    )
    rest = [] if before.samplers[0].finished else after.run()
    assert sorted(seen(done) + seen(rest)) == list(range(job["size"]))


@SETTINGS
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.floats(1e-3, 1e6), st.integers(0, 99))
def test_equal_lengths_are_cut_as_without_lengths(sizes: list[int], cost: float, seed: int) -> None:
    shares = np.array(sizes)
    samples = np.random.default_rng(seed).permutation(500)[: shares.sum()]
    cut = SampleCosts([cost] * 500, 500).cut(samples, shares, **NO_BOUNDS)
    assert cut.counts.tolist() == sizes
    assert cut.samples is None
    assert cut.work == pytest.approx(shares, rel=1e-9)


@SETTINGS
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.integers(0, 999), st.floats(0.1, 2.0))
def test_costs_are_in_proportion_but_for_one_sample(sizes: list[int], seed: int, sigma: float) -> None:
    shares, lengths = np.array(sizes), lognormal(400, seed, sigma)
    samples = np.random.default_rng(seed).permutation(400)[: shares.sum()]
    cut = SampleCosts(lengths, 400).cut(samples, np.minimum(shares, 1) * shares, **NO_BOUNDS)
    target = lengths[samples].sum() * shares / shares.sum()
    largest, beyond = lengths[samples].max(), np.abs(cut.work * lengths.mean() - target)
    assert cut.counts.sum() == shares.sum()
    assert (cut.counts[shares == 0] == 0).all()
    free = cut.counts > np.minimum(shares, 2)  # a rank with a share gets two samples at least, whatever they cost
    if free[shares > 0].all():
        assert (beyond <= largest * (1 + 1e-9)).all()


@SETTINGS
@given(st.integers(0, 999), st.booleans(), st.booleans())
def test_bounds_of_samples_hold(seed: int, padded: bool, in_pieces: bool) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.integers(0, 20, 6)
    shares[0] += 3
    low, high = rng.integers(1, 12, 6), rng.integers(10, 30, 6)
    samples = rng.permutation(300)[: shares.sum()]
    costs = SampleCosts(lognormal(300, seed, 1.5), 300, padded=padded)
    cut = costs.cut(samples, shares, low, high, turn=seed, in_pieces=in_pieces)
    assert (cut.counts >= np.minimum(shares, low)).all()
    assert (cut.counts <= np.where(shares > 0, np.maximum(high, shares), 0)).all()
    assert sorted(samples.tolist()) == sorted((samples if cut.samples is None else cut.samples).tolist())
    assert cut.work.sum() == pytest.approx(costs.costs[samples].sum() / costs.mean)


def test_what_dealing_by_length_gains() -> None:
    shares, rng = np.full(8, 32), np.random.default_rng(0)
    lengths = lognormal(5000, 1, 0.5)
    costs = SampleCosts(lengths, 5000, padded=True)
    slowest = []
    for number in range(40):
        samples = rng.permutation(5000)[:256]
        cut = costs.cut(samples, shares, turn=number, **NO_BOUNDS)
        assert cut.samples is not None
        ends = np.cumsum(cut.counts)
        paid = [n * lengths[cut.samples[end - n : end]].max() for n, end in zip(cut.counts, ends, strict=True)]
        assert cut.work / cut.work.sum() == pytest.approx(np.array(paid) / sum(paid))
        at_random = [32 * lengths[part].max() for part in np.split(samples, 8)]
        slowest.append((max(paid), max(at_random)))
    padded, at_random = np.mean(slowest, axis=0) / (lengths.mean() * 32)
    assert padded < 1.3
    assert at_random > 3.0


def test_ranks_take_turns_at_long_samples() -> None:
    costs = SampleCosts(np.arange(1, 101), 100, padded=True)
    shares = np.full(4, 10)
    first = [int(costs.cut(np.arange(40), shares, turn=t, **NO_BOUNDS).counts.argmin()) for t in range(4)]
    assert sorted(first) == [0, 1, 2, 3]


@pytest.mark.parametrize("padded", [False, True])
def test_a_large_round_is_cut_quickly(padded: bool) -> None:
    costs = SampleCosts(lognormal(50_000, 0), 50_000, padded=padded)
    samples, shares = np.random.default_rng(0).permutation(50_000)[:16_384], np.full(256, 64)
    taken = []
    for _ in range(20):
        began = time.process_time()
        costs.cut(samples, shares, **NO_BOUNDS)
        taken.append(time.process_time() - began)
    assert min(taken) < (5e-3 if padded else 1e-3)


def test_ways_to_say_lengths() -> None:
    told = [3.0, 1.0, 2.0]
    ways: list[Any] = [told, np.array(told), torch.tensor(told), torch.tensor(told).bfloat16(), lambda i: told[i]]
    assert len({SampleCosts(way, 3).checksum for way in ways}) == 1
    assert SampleCosts([3, 1, 2], 3).checksum != SampleCosts([1, 3, 2], 3).checksum


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([1.0, 2.0], r"shape of lengths=\(2,\)"),
        ([1.0, 0.0, 2.0], r"lengths\[1\]=0.0 .*above 0.*cost 1"),
        ([1.0, float("nan"), 2.0], r"lengths\[1\]=nan"),
        ([1.0, -2.0, 2.0], r"lengths\[1\]=-2.0"),
        (["a", "b", "c"], "lengths"),
        ([1e308] * 3, "largest of lengths"),
        (7, "lengths"),
        (lambda i: None, "lengths"),
    ],
)
def test_impossible_lengths_are_named(lengths: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SampleCosts(lengths, 3)


def test_regions_have_no_lengths() -> None:
    with pytest.raises(ConfigError, match=r"partition.*lengths"):
        BatchSampler(9, Allocations([2]), rank=0, world_size=1, partition="contiguous", costs=SampleCosts([1.0] * 9, 9))


def test_a_resume_with_other_lengths_is_refused() -> None:
    def sampler(lengths: list[float] | None) -> BatchSampler:
        costs = None if lengths is None else SampleCosts(lengths, 4)
        return BatchSampler(4, Allocations([2]), rank=0, world_size=1, costs=costs)

    state = sampler([1.0, 2.0, 3.0, 4.0]).state_dict()
    with pytest.raises(StateError, match=r"lengths have the checksum .* lengths="):
        sampler([2.0, 1.0, 3.0, 4.0]).load_state_dict(state)
    sampler([1.0, 2.0, 3.0, 4.0]).load_state_dict(state)
    sampler(None).load_state_dict(state)
    sampler([1.0, 2.0, 3.0, 4.0]).load_state_dict(sampler(None).state_dict())
