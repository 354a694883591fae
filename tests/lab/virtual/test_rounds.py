"""The virtual clock where workers step apart and meet over parameters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F

from dynamix.data.plan import pieces_of
from dynamix.errors import ConfigError
from dynamix.events.records import read_events
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds
from dynamix_lab.simulator import Clusters, sample_clusters
from dynamix_lab.virtual.cluster import VirtualCluster
from dynamix_lab.virtual.run import VirtualRun
from tests.lab.virtual.small import Watched, dataset, made
from tests.union import Script

SHARE, PIECE, INTERVAL, SAMPLES = 32, 8, 3, 1000
SHARES = [[40, 24], [12, 52], [0, 64], [32, 32], [54, 10]]


def virtual(case: dict[str, Any] | None = None, *, workers: int = 2, **options: Any) -> VirtualCluster:
    """Of two workers; `case` is what `made` takes."""
    net, optimizer = made(**(case or {}))
    usual = {"dataset": dataset(SAMPLES), "clusters": sample_clusters(1, workers, seed=3), "policy": Script(SHARES)}
    usual |= {"bounds": Bounds.of(2, 0, 64) if workers == 2 else None, "batch_size": SHARE, "micro_batch": PIECE}
    usual |= {"meet": "parameters", "averaging": Averaging(), "interval": INTERVAL, "seed": 4}
    options = {**usual, **options}
    return VirtualCluster(net, optimizer, F.cross_entropy, options.pop("dataset"), **options)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("workers", [1, 4])
def test_every_sample_comes_once_an_epoch_in_pieces_of_the_micro_batch(workers: int) -> None:
    watched = Watched(workers * SHARE * 5 + 13)
    policy = "lb_bsp" if workers > 1 else "static"
    with virtual(workers=workers, bounds=None, policy=policy, dataset=watched, interval=1) as cluster:
        run = cluster.run(until=lambda now: now.samples >= len(watched), snapshot_samples=1)
    assert Counter(watched.asked) == Counter(range(len(watched)))
    shares = run.counts[run.counts > 0].tolist()
    assert sorted(watched.sizes) == sorted(size for share in shares for size in pieces_of(share, PIECE))
    assert {counts.sum() for counts in run.counts[:-2]} == {workers * SHARE}
    assert run.loss[-1] < run.loss[0]


def test_one_plain_step_a_round_is_the_step_along_the_union_batchs_gradient() -> None:
    def run(**how: Any) -> VirtualRun:
        with virtual({"momentum": 0.0}, micro_batch=64, lr_rule="none", **how) as cluster:
            return cluster.run(20)

    bounds = Bounds.of(2, 0, 64, quantum=2)
    apart = run(bounds=bounds)
    fixed = dataclasses.replace(bounds, total_low=np.array(64), total_high=np.array(64))
    # A window of steps of 64 samples a worker has twice as many rounds of 32.
    together = run(meet="gradients", averaging=None, bounds=fixed, interval=2 * INTERVAL)
    np.testing.assert_array_equal(apart.counts, together.counts)
    np.testing.assert_allclose(apart.loss, together.loss, rtol=1e-9)


# ---------------------------------------------------------------- the clock


def at_rest(workers: int = 2, **changed: Any) -> Clusters:
    """Constant speeds: 10 ms a step and 1 ms a sample, twice that on the second worker; 50 ms an exchange."""
    shape = (1, workers)
    slow = 1.0 + (np.arange(workers) % 2)[None]
    known = {name: np.full(shape, 1e12) for name in ("slow_off_s",)}
    known |= {"alpha": 0.01 * slow, "beta": 0.001 * slow, "jitter_sd": np.zeros(shape), "stall": np.zeros(1)}
    known |= {"exchange_s": np.array([0.05]), "neighbour_factor": np.ones(1), "slow_strongest": np.ones(shape)}
    none = dict.fromkeys(("link_off_s", "link_on_s", "link_strongest", "stairs", "jitter_memory", "together_sd"))
    none |= dict.fromkeys(("jitter_s", "cost_sigma", "curve", "cliff_at", "cliff_slope", "change_cost_s"))
    none |= dict.fromkeys(("decision_s", "bytes_share"))
    names = {field.name for field in dataclasses.fields(Clusters)}
    given = {name: value for name, value in {**none, **known, **changed}.items() if name in names}
    return dataclasses.replace(sample_clusters(1, workers, seed=3), **given)


@pytest.mark.parametrize("meet", ["gradients", "parameters"])
def test_windows_that_follow_what_changes_are_counted_in_rounds(tmp_path: Path, meet: str) -> None:
    how = {"policy": "goodput", "clusters": at_rest(), "events": tmp_path / "e", "meet": meet}
    if meet == "gradients":
        how["averaging"] = None
    with virtual(interval="auto", **how) as cluster:
        cluster.run(40)
    events = read_events(tmp_path / "e")
    assert [event["window"]["steps"] for event in events[1:]] == [event["interval"] for event in events[:-1]]
    assert [event["window"]["steps"] for event in events[:3]] == [2, 4, 4]


def test_a_round_takes_the_slowest_workers_steps_and_one_meeting_of_all_bytes() -> None:
    with virtual(clusters=at_rest(), policy="static", bounds=None) as cluster:
        run = cluster.run(3)
    np.testing.assert_allclose(run.compute_s, [[0.04 + SHARE / 1000, 0.08 + 2 * SHARE / 1000]] * 3)
    # Parameters with momentum, and beside the moves one number more, beside the states as many as there are weights.
    assert run.step_s - run.compute_s.max(1) == pytest.approx([0.1] * 3, rel=0.05)
    with virtual(clusters=at_rest(), policy="static", bounds=None, averaging=Averaging("kept")) as cluster:
        run = cluster.run(3)
    assert run.step_s - run.compute_s.max(1) == pytest.approx([0.05] * 3, rel=0.01)


def test_windows_attribute_computing_waiting_and_the_meeting(tmp_path: Path) -> None:
    how = {"policy": Script([[48, 16]]), "clusters": at_rest(), "events": tmp_path / "e"}
    with virtual(**how) as cluster:
        run = cluster.run(9)
    assert run.counts[-1].tolist() == [48, 16]
    window = read_events(tmp_path / "e")[1]["window"]
    np.testing.assert_allclose(window["compute"], [0.108, 0.072])
    np.testing.assert_allclose(window["wait"], [0.0, 0.036], atol=1e-9)
    np.testing.assert_allclose(window["communication"], run.step_s[-1] - 0.108)


def test_memory_bounds_pieces_not_shares() -> None:
    clusters = at_rest(memory_cap=np.array([[4, 64]]))
    with virtual(clusters=clusters, policy="static", bounds=None) as cluster:
        np.testing.assert_allclose(cluster.run(1).compute_s, [[0.08 + 0.032, 0.08 + 0.064]])


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"meet": "sometimes"}, ["meet='sometimes'", "parameters"]),
        ({"rounds": "often"}, ["rounds='often'"]),
        ({"meet": "gradients", "averaging": None, "rounds": "adaptive"}, ["rounds='adaptive'", "meet='parameters'"]),
        ({"meet": "gradients"}, ["averaging", "None where workers meet over gradients"]),
        ({"policy": "pollux"}, ["global_batch='fixed'", "pollux", "lb_bsp"]),
        ({"micro_batch": 0}, ["micro_batch=0"]),
        ({"bounds": Bounds.of(3, 1, 64)}, ["shape of bounds=(3,)"]),
        ({"batch_size": 600, "bounds": None}, ["1200", "1000"]),
    ],
)
def test_bad_arguments_name_value_range_and_fix(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        virtual(**options)
    for word in words:
        assert word in str(caught.value)
