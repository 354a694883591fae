import math
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.errors import ConfigError
from dynamix_lab.statistics import (
    balanced_order,
    geometric_mean,
    paired_ratio,
    time_to_target,
    who_wins,
)
from tests.refused import refused

scores = st.lists(st.floats(0, 1), min_size=1, max_size=12)
positive = st.floats(0.1, 1e3)


@given(scores, st.floats(0.01, 0.99))
def test_target_is_reached_exactly_when_two_snapshots_in_a_row_are_there(values, target):
    times = list(range(1, len(values) + 1))
    reached = time_to_target(times, values, target)
    pairs = [i for i in range(len(values) - 1) if values[i] >= target and values[i + 1] >= target]
    assert (reached is not None) == bool(pairs)
    if reached is not None:
        first = pairs[0]
        assert times[max(0, first - 1)] <= reached <= times[first]


def test_one_lucky_snapshot_does_not_count():
    assert time_to_target([1, 2, 3, 4, 5], [0.1, 0.95, 0.2, 0.8, 1.0], 0.9) is None
    assert time_to_target([1, 2, 3, 4, 5], [0.95, 0.2, 0.7, 1.0, 1.0], 0.85) == pytest.approx(3.5)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8))
def test_ratio_and_its_inverse_agree(pairs):
    a, b = zip(*pairs, strict=True)
    forward, backward = paired_ratio(a, b, resamples=200), paired_ratio(b, a, resamples=200)
    assert forward.median * backward.median == pytest.approx(1)
    assert forward.low <= forward.median * (1 + 1e-9)
    assert forward.median <= forward.high * (1 + 1e-9)
    assert forward.median == pytest.approx(geometric_mean(np.array(a) / np.array(b)))


def test_scenarios_weigh_the_same_whatever_their_number_of_pairs():
    result = paired_ratio({"a": [2.0], "b": [1.0] * 9}, {"a": [1.0], "b": [1.0] * 9}, resamples=50)
    assert result.median == pytest.approx(math.sqrt(2))


def test_a_few_scenarios_of_many_pairs_cover_a_known_ratio():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        logs = {name: rng.normal(0, 0.1) + rng.normal(0, 0.05, 10) for name in "abcd"}
        found = paired_ratio(
            {name: np.exp(values).tolist() for name, values in logs.items()}, dict.fromkeys(logs, [1.0] * 10)
        )
        hits += found.low <= 1.0 <= found.high
    assert hits >= 182  # 190 expected


def test_a_single_pair_has_no_interval_and_says_so_in_json():
    assert paired_ratio([1.0], [2.0]).to_dict() == {"median": 0.5, "low": None, "high": None}


def test_impossible_pairs_and_rows_are_refused_and_one_pair_tells_nobody_apart():
    for above, below in (([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([], [])):
        refused(ConfigError, "", paired_ratio, above, below)
    refused(ConfigError, "", who_wins, {})
    refused(ConfigError, "", who_wins, {"a": [1.0], "b": [1.0, 2.0]})
    assert who_wins({"a": [1.0], "b": [2.0]}).level == ("b",)
    assert who_wins({"a": [1.0]}).level == ()


@given(st.integers(0, 50), st.integers(1, 6))
def test_every_policy_takes_every_place_equally_often(block, n):
    names = [str(i) for i in range(n)]
    orders = [balanced_order(names, block * n + i) for i in range(n)]
    for place in range(n):
        assert sorted(order[place] for order in orders) == names


@given(st.integers(0, 50), st.integers(2, 8))
def test_every_policy_runs_after_every_other_one_equally_often(block, n):
    names = [str(i) for i in range(n)]
    seeds = range(block * 2 * n, (block * 2 + 1 + n % 2) * n)
    orders = [balanced_order(names, seed) for seed in seeds]
    after = Counter(pair for order in orders for pair in pairwise(order))
    assert after == dict.fromkeys(permutations(names, 2), 1 + n % 2)


def test_a_true_difference_of_three_percent_wins_and_a_small_one_is_level():
    rng = np.random.default_rng(0)
    mean_s = {"slow": 20.0, "ours": 10.0, "near": 10.02, "third": 10.3}
    rows = {name: (mean * np.exp(0.005 * rng.standard_normal(10))).tolist() for name, mean in mean_s.items()}
    found = who_wins(rows)
    assert {found.best, *found.level} == {"ours", "near"}
    assert found.ratios["slow"].median == pytest.approx(2, rel=0.02)
    assert list(found.ratios)[-1] == "slow"
