"""The virtual clock: a live job's numbers in one process, on the simulator's time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dynamix
from dynamix.data import Allocations, BatchSampler
from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.events.records import read_events
from dynamix.window import Bounds
from dynamix_lab.simulator import ClusterEnv, sample_clusters
from dynamix_lab.virtual.cluster import VirtualCluster
from tests.lab.virtual.small import Watched, dataset, network, weights
from tests.refused import refused
from tests.union import Script

INTERVAL = 3

_OPEN: list[VirtualCluster] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def _virtual(net: nn.Module, workers: int = 4, **options: Any) -> VirtualCluster:
    usual = {"dataset": dataset(350), "clusters": sample_clusters(1, workers, seed=3), "batch_size": 8}
    options = {**usual, "interval": INTERVAL, "seed": 4, "policy": "lb_bsp", **options}
    made = VirtualCluster(net, _sgd(net), F.cross_entropy, options.pop("dataset"), **options)
    _OPEN.append(made)
    return made


# ---------------------------------------------------------------- the clock


def test_time_is_the_simulators_own_for_the_same_allocations(tmp_path: Path) -> None:
    clusters, events = sample_clusters(1, 8, seed=5), tmp_path / "events.jsonl"
    cluster = _virtual(network(), clusters=clusters, dataset=dataset(4000), events=events)
    run = cluster.run(60)
    assert len(np.unique(run.counts, axis=0)) > 3
    world = ClusterEnv(clusters, seed=4, interval=1)
    for t, counts in enumerate(run.counts):
        world.apply(counts[None])
        busy, whole = world.advance()
        np.testing.assert_array_equal(run.compute_s[t], busy[0])
        assert run.step_s[t] == whole[0]
    np.testing.assert_allclose(run.time_s, np.cumsum(run.step_s))
    assert cluster.time_s == run.time_s[-1]
    assert read_events(events)[0]["time_s"] == run.time_s[INTERVAL - 1]
    assert 0 < run.wait_fraction < 1


@pytest.mark.parametrize("hidden", [False, True])
def test_windows_attribute_computing_waiting_and_transfer_as_a_live_job_does(tmp_path: Path, hidden: bool) -> None:
    events = tmp_path / "events.jsonl"
    clusters = dataclasses.replace(sample_clusters(1, 4, seed=3), missing_host=np.array([hidden]))
    run = _virtual(network(), policy="static", interval=5, dataset=dataset(4000), events=events, clusters=clusters).run(
        10
    )
    for k, event in enumerate(read_events(events)):
        window, part = event["window"], slice(5 * k, 5 * k + 5)
        busy, slowest = run.compute_s[part], run.compute_s[part].max(1, keepdims=True)
        np.testing.assert_allclose(window["compute"], busy.mean(0))
        np.testing.assert_allclose(window["compute_std"], busy.std(0, ddof=1))
        np.testing.assert_allclose(window["wait"], (slowest - busy).mean(0), atol=1e-12)
        np.testing.assert_allclose(window["communication"], (run.step_s[part] - slowest[:, 0]).mean(), rtol=1e-6)
        assert window["data"] == [0.0] * 4
        if hidden:
            assert window["cpu"] == window["memory"] == [None] * 4
        else:
            np.testing.assert_allclose(window["cpu"], busy.sum(0) / run.step_s[part].sum())


@pytest.mark.parametrize("delay", [0, 4])
def test_a_decision_applies_after_the_worlds_delay(tmp_path: Path, delay: int) -> None:
    world = ClusterEnv(sample_clusters(1, 4, seed=3), seed=0, delay=delay)
    script = Script([[4, 12, 8, 8], [8, 8, 4, 12]])
    cluster = _virtual(network(), clusters=world, policy=script, events=tmp_path / "e", dataset=dataset(4000))
    run = cluster.run(30)
    for event in read_events(tmp_path / "e")[:3]:
        closed_at = int(event["window"]["step"])
        assert event["from_step"] == closed_at + delay
        assert run.counts[closed_at + delay].tolist() == event["allocation"]
        if delay:
            assert run.counts[closed_at + delay - 1].tolist() == event["window"]["batch_size"]
        assert event["window"]["steps"] == INTERVAL


def test_simulated_memory_bounds_the_batch_sizes() -> None:
    clusters = dataclasses.replace(sample_clusters(1, 4, seed=3), memory_cap=np.array([[10, 64, 64, 64]]))
    cluster = _virtual(network(), clusters=clusters, policy=Script([[30, 2, 2, 2]]))
    assert cluster.bounds.high.tolist() == [10, 64, 64, 64]
    assert cluster.run(20).counts[:, 0].max() == 10
    refused(ConfigError, "1 to 10 on rank 0", _virtual, network(), clusters=clusters, batch_size=16)


def test_policies_that_decide_per_epoch_change_at_its_start(tmp_path: Path) -> None:
    run = _virtual(network(), policy="dbs", events=tmp_path / "e").run(40)
    events = read_events(tmp_path / "e")
    assert [e["samples_seen"] for e in events] == [350, 700, 1050][: len(events)]
    changes = 1 + np.flatnonzero((np.diff(run.counts, axis=0) != 0).any(1))
    starts = [int(np.searchsorted(np.cumsum(run.counts.sum(1)), 350 * k)) + 1 for k in (1, 2, 3)]
    assert events[0]["from_step"] == starts[0]
    assert set(starts) & set(changes.tolist())


def test_a_new_allocation_costs_what_the_world_says_and_a_tail_nothing() -> None:
    clusters = dataclasses.replace(sample_clusters(1, 4, seed=3), change_cost_s=np.array([1000.0]))
    run = _virtual(network(), clusters=clusters, policy=Script([[4, 12, 8, 8], [8, 8, 4, 12]])).run(40)
    paid = run.step_s > 900
    regular = run.counts.sum(1) == 32
    before = [run.counts[:t][regular[:t]][-1] for t in range(1, 40)]
    changed = [ok and not np.array_equal(b, c) for ok, b, c in zip(regular[1:], before, run.counts[1:], strict=True)]
    assert not regular.all()
    assert paid[1:].tolist() == changed
    assert sum(changed) > 4


# ---------------------------------------------------------------- training


def _train(policy: Any, events: Path, steps: int = 40) -> tuple[np.ndarray, Tensor, bytes]:
    net = network(nn.Dropout(0.3), dtype=torch.float32)
    cluster = _virtual(net, policy=policy, events=events, dataset=dataset(350, torch.float32), lr_rule="adascale")
    before = torch.get_rng_state()
    run = cluster.run(steps)
    assert torch.equal(before, torch.get_rng_state())
    cluster.close()
    return np.column_stack([run.loss, run.time_s, run.counts]), weights(net), events.read_bytes()


def test_repeats_to_the_last_bit_and_leaves_global_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(11)
    first = _train("dynamix", tmp_path / "a")
    torch.manual_seed(12)
    second = _train("dynamix", tmp_path / "b")
    np.testing.assert_array_equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]
    assert first[0][-5:, 0].mean() < first[0][:5, 0].mean()


def test_never_more_than_a_micro_batch_passes_through_the_model_at_once() -> None:
    results = []
    for micro_batch in (7, 10_000):
        net, data, largest = network(), Watched(1000), [0]
        net.register_forward_pre_hook(lambda _, args, largest=largest: largest.append(len(args[0])))
        run = _virtual(net, dataset=data, batch_size=50, micro_batch=micro_batch).run(9)
        assert max(largest) == max(data.sizes) <= micro_batch
        results.append((run.loss, weights(net)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("workers", [1, 64])
def test_any_number_of_workers_sees_every_sample_once(tmp_path: Path, workers: int) -> None:
    steps, each = 10, 3
    data = Watched(workers * each * steps)
    cluster = _virtual(
        network(), workers, dataset=data, batch_size=each, interval=2, events=tmp_path / "e", lr_rule="adascale"
    )
    run = cluster.run(until=lambda snapshot: snapshot.samples >= len(data), snapshot_samples=1)
    assert Counter(data.asked) == Counter(range(len(data)))
    assert cluster.samples_seen == run.counts.sum() == len(data)
    assert np.isfinite(run.loss).all()
    assert workers == 1 or len(np.unique(run.counts, axis=0)) > 1
    last = read_events(tmp_path / "e")[-1]["window"]
    assert last["noise"] > 0


def test_workers_without_a_share_compute_nothing_and_their_speed_is_not_known(tmp_path: Path) -> None:
    bounds = Bounds.of(4, 0, 40)
    cluster = _virtual(network(), policy=Script([[0, 16, 16, 0]]), bounds=bounds, events=tmp_path / "e")
    run = cluster.run(25)
    assert run.counts[-1].tolist() == [0, 16, 16, 0]
    assert run.compute_s[-1][[0, 3]].tolist() == [0, 0]
    window = dynamix.Window.from_dict(read_events(tmp_path / "e")[-1]["window"])
    assert np.isnan(window.compute).tolist() == [True, False, False, True]
    assert np.isnan(window.gradient_norm_sq).tolist() == [True, False, False, True]
    assert window.wait[0] > window.wait[1:3].min()
    assert window.noise > 0


def test_sparse_gradients_are_the_dense_ones() -> None:
    losses = []
    for sparse in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(20, 6, sparse=sparse), nn.Flatten(), nn.Linear(12, 3))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 20, (200, 2), generator=generator)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = TensorDataset(tokens, tokens[:, 0] % 3)
        job = {"clusters": sample_clusters(1, 4, seed=3), "policy": "lb_bsp", "batch_size": 8}
        cluster = VirtualCluster(net, optimizer, F.cross_entropy, data, **job)
        losses.append(cluster.run(30).loss)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_snapshots_are_scored_off_the_clock_and_a_run_can_go_on() -> None:
    whole, parts = network(nn.Dropout(0.2)), network(nn.Dropout(0.2))
    data = dataset(1000)
    modes = []

    def score(net: nn.Module) -> float:
        modes.append((net.training, torch.is_grad_enabled()))
        torch.rand(7)
        next(iter(DataLoader(data, batch_size=100)))  # draws a seed of its own
        return float((net(data.tensors[0]).argmax(1) == data.tensors[1]).double().mean())

    straight = _virtual(whole, dataset=data).run(40)
    cluster = _virtual(parts, dataset=data)
    first = cluster.run(snapshot_samples=200, score=score, until=lambda s: s.samples >= 600)
    second = cluster.run(40 - len(first.loss))
    assert parts.training
    assert set(modes) == {(False, False)}
    assert [s.samples // 200 for s in first.snapshots] == [1, 2, 3]
    assert first.snapshots[-1].time_s == first.time_s[-1]
    assert first.snapshots[0].score < first.snapshots[-1].score
    assert torch.equal(weights(whole), weights(parts))
    np.testing.assert_array_equal(np.concatenate([first.time_s, second.time_s]), straight.time_s)


# ---------------------------------------------------------------- bad input


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clusters": sample_clusters(2, 4, seed=0)}, ["clusters='2 clusters'", "take([i])"]),
        ({"batch_size": 0}, ["batch_size=0", "1 or more"]),
        ({"micro_batch": 1.5}, ["micro_batch=1.5"]),
        ({"interval": 0}, ["interval=0"]),
        ({"policy": "nonsense"}, ["policy='nonsense'"]),
        ({"policy": object()}, ["decide, state_dict, load_state_dict"]),
        ({"lr_rule": "cubic"}, ["lr_rule='cubic'"]),
        ({"bounds": Bounds.of(3, 1, 8)}, ["shape of bounds=(3,)", "(4,)"]),
        ({"bounds": Bounds.of(4, 1, 6)}, ["batch_size=8", "1 to 6"]),
        ({"batch_size": 100}, ["400", "350"]),
        ({"dataset": Endless()}, ["dataset='Endless'", "length"]),
    ],
)
def test_bad_arguments_name_value_range_and_fix(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        _virtual(network(), **options)
    for word in words:
        assert word in str(caught.value)


def test_every_ranks_indices_need_one_shared_order() -> None:
    sampler = BatchSampler(20, Allocations([2, 3]), rank=0, world_size=2, shuffle=False)
    for _ in sampler:
        break
    assert sampler.shares() == [[0, 1], [2, 3, 4]]
    regions = BatchSampler(20, Allocations([2, 3]), rank=0, world_size=2, partition="contiguous")
    refused(UsageError, "stream", regions.shares)


def test_models_that_cannot_be_played_by_one_process_are_refused() -> None:
    refused(ConfigError, "SyncBatchNorm", _virtual, network(nn.SyncBatchNorm(16)))
    net = network()
    with pytest.raises(ConfigError, match="optimizer"):
        VirtualCluster(
            net, _sgd(network()), F.cross_entropy, dataset(350), clusters=sample_clusters(1, 4, seed=0), batch_size=8
        )
    frozen = network().requires_grad_(False)
    refused(ConfigError, "requires_grad", _virtual, frozen)


def test_runs_without_an_end_and_losses_without_a_mean_are_refused(tmp_path: Path) -> None:
    cluster = _virtual(network())
    for arguments in ({}, {"steps": 0}, {"until": lambda _: True}, {"steps": 3, "snapshot_samples": 0}):
        refused(ConfigError, "", cluster.run, **arguments)
    net = network()
    each = nn.CrossEntropyLoss(reduction="none")
    cluster = VirtualCluster(net, _sgd(net), each, dataset(350), clusters=sample_clusters(1, 4, seed=0), batch_size=8)
    refused(ConfigError, "reduction='mean'", cluster.run, 1)
    triples = TensorDataset(*dataset(350).tensors, torch.zeros(350))
    refused(ConfigError, r"inputs, target", _virtual(network(), dataset=triples).run, 1)
    refused(StateError, "cannot read", _virtual, network(), replay=tmp_path / "missing")
    _virtual(network(), policy=Script([[4, 12, 8, 8]]), events=tmp_path / "e").run(9)
    refused(StateError, "policy and interval", _virtual(network(), replay=tmp_path / "e", interval=8).run, 20)


@pytest.mark.parametrize("padded", [False, True])
def test_rounds_are_cut_by_what_samples_cost(padded: bool) -> None:
    costs = np.exp(np.random.default_rng(0).normal(size=350))
    net, bounds = network(), Bounds.of(4, 1, 64, total_low=32, total_high=32)
    clusters = sample_clusters(1, 4, seed=0)
    run = _virtual(net, clusters=clusters, bounds=bounds, lengths=costs, padded=padded, seed=0).run(steps=8)
    assert run.counts.sum(1).tolist() == [32] * 8
    assert len({tuple(counts) for counts in run.counts[:INTERVAL].tolist()}) > 1
    with pytest.raises(ConfigError, match="noise scale"):
        VirtualCluster(net, _sgd(net), F.cross_entropy, dataset(350), clusters=clusters, lengths=costs, padded=True)
