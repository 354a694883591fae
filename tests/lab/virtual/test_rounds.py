"""The virtual clock where workers step apart and meet over parameters."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dynamix
from dynamix.data.plan import pieces_of
from dynamix.errors import ConfigError
from dynamix.events.records import read_events
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds
from dynamix_lab.simulator import Clusters, sample_clusters
from dynamix_lab.virtual.cluster import VirtualCluster
from dynamix_lab.virtual.run import VirtualRun
from tests.lab.virtual.small import Watched, assert_same_windows, dataset, network, weights
from tests.ranks import run_ranks
from tests.runtime.jobs import decided, in_turns
from tests.union import Script

SHARE, PIECE, INTERVAL, SAMPLES, EPOCHS = 32, 8, 3, 1000, 2
SHARES = [[40, 24], [12, 52], [0, 64], [32, 32], [54, 10]]
GROWING = [[40, 24], [40, 40], [60, 30], [50, 20], [20, 60]]


def nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def made(case: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = network(*([nn.BatchNorm1d(16)] if case.get("norm") else []))
    if case.get("adam"):
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=case.get("momentum", 0.9))


def schedule_for(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)


def virtual(case: dict[str, Any] | None = None, **options: Any) -> VirtualCluster:
    case = case or {}
    net, optimizer = made(case)
    workers = case.get("workers", 2)
    usual = {"dataset": dataset(SAMPLES), "clusters": sample_clusters(1, workers, seed=3), "policy": Script(SHARES)}
    usual |= {"bounds": Bounds.of(2, 0, 64) if workers == 2 else None, "batch_size": SHARE, "micro_batch": PIECE}
    usual |= {"meet": "parameters", "averaging": Averaging(**case.get("how", {})), "interval": INTERVAL, "seed": 4}
    options = {**usual, **options}
    return VirtualCluster(net, optimizer, F.cross_entropy, options.pop("dataset"), **options)


# ---------------------------------------------------------------- against real processes


def live(rank: int, events: str, case: dict[str, Any]) -> dict[str, Any]:
    """The loop of docs/rounds.md on two ranks, the second of them slower."""
    (net, optimizer), rounds, meet = made(case), case.get("rounds", "fixed"), case.get("meet", "parameters")
    how = {"max_batch_size": 64 if rounds == "fixed" else 96, "micro_batch": PIECE if meet == "parameters" else None}
    how |= {"meet": meet, "global_batch": rounds, "interval": INTERVAL, "events": events}
    in_turns()
    controller = dynamix.Controller(case["policy"], SHARE, min_batch_size=0, **how)
    sampler = controller.batch_sampler(dataset(SAMPLES), seed=4)
    ours = net if meet == "parameters" else DistributedDataParallel(net)
    model = controller.wrap(ours, optimizer, averaging=Averaging(**case.get("how", {})))
    controller.scheduler(schedule_for(optimizer))
    losses, counts = [0.0], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset(SAMPLES), batch_sampler=sampler):
            piece = sampler.piece()
            with controller.piece():
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                loss.backward()
            time.sleep(0.0003 * piece.samples * (1 + rank))
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss, logits=logits, target=y)
            losses[-1] += loss.item() * piece.samples
            if controller.met:
                counts.append(piece.plan.counts.tolist())
                losses.append(0.0)
    controller.close()
    return {"losses": losses[:-1], "counts": counts, "weights": weights(net), "parameters": trained(net)}


def trained(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in net.parameters()])


CASES: list[dict[str, Any]] = [
    {"policy": "lb_bsp"},
    {"policy": "lb_bsp", "rounds": "adaptive"},
    {"policy": Script(SHARES), "norm": True, "adam": True},
    {"policy": Script(SHARES), "how": {"outer": nesterov, "optimizer_state": "kept"}},
    {"policy": Script(SHARES), "how": {"optimizer_state": "reset", "wire": "bfloat16"}},
    {"policy": Script(SHARES), "meet": "auto", "norm": True, "adam": True},
    {"policy": Script(GROWING), "meet": "auto", "rounds": "adaptive", "how": {"optimizer_state": "kept"}},
]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "case", CASES, ids=["shares", "rounds", "batchnorm-adam", "outer-kept", "reset-bfloat16", "auto", "auto-grows"]
)
def test_equals_a_real_job_of_two_processes(tmp_path: Path, case: dict[str, Any]) -> None:
    recorded = tmp_path / "live.jsonl"
    ranks = run_ranks(live, 2, str(recorded), case)
    counts = np.array(ranks[0]["counts"])
    losses = np.array([of_rank["losses"] for of_rank in ranks]).sum(0) / counts.sum(1)
    assert len({tuple(of_round) for of_round in counts.tolist()}) >= 3
    assert counts.sum() == EPOCHS * SAMPLES

    events = tmp_path / "virtual.jsonl"
    how = {} if case.get("rounds") is None else {"bounds": Bounds.of(2, 0, 96), "rounds": case["rounds"]}
    if case.get("meet") == "auto":
        apart = {event.get("piece", 0) for event in read_events(recorded)}
        assert len(apart) > (2 if case.get("rounds") else 1)
        how["meet"] = "auto"
    with virtual(case, policy=case["policy"], replay=recorded, events=events, **how) as cluster:
        cluster.scheduler(schedule_for(cluster.optimizer))
        run = cluster.run(len(losses))
        exact = 1e-9 if case.get("how", {}).get("wire") is None else 1e-3
        np.testing.assert_array_equal(run.counts, counts)
        np.testing.assert_allclose(run.loss, losses, rtol=exact)
        # With "auto" each rank begins a round apart with buffers of its own.
        what, mine = ("parameters", trained) if case.get("meet") == "auto" else ("weights", weights)
        torch.testing.assert_close(mine(cluster.model), ranks[0][what], rtol=exact, atol=exact)
    one, other = decided(recorded), decided(events)
    assert len(one) == len(other) > 2
    assert_same_windows(one, other, rtol=max(exact, 1e-6))
    # By lb_bsp it is measured only in rounds in which both workers have pieces to compare.
    assert case["policy"] == "lb_bsp" or other[-1]["window"]["noise"] is not None


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_every_sample_comes_once_an_epoch_in_pieces_of_the_micro_batch(workers: int) -> None:
    watched = Watched(workers * SHARE * 5 + 13)
    policy = "lb_bsp" if workers > 1 else "static"
    with virtual({"workers": workers}, bounds=None, policy=policy, dataset=watched, interval=1) as cluster:
        run = cluster.run(until=lambda now: now.samples >= len(watched), snapshot_samples=1)
    assert Counter(watched.asked) == Counter(range(len(watched)))
    shares = run.counts[run.counts > 0].tolist()
    assert sorted(watched.sizes) == sorted(size for share in shares for size in pieces_of(share, PIECE))
    assert {counts.sum() for counts in run.counts[:-2]} == {workers * SHARE}
    assert run.loss[-1] < run.loss[0]


def test_one_plain_step_a_round_is_the_step_along_the_union_batchs_gradient() -> None:
    def trained(**how: Any) -> VirtualRun:
        with virtual({"momentum": 0.0}, micro_batch=64, lr_rule="none", **how) as cluster:
            return cluster.run(20)

    bounds = Bounds.of(2, 0, 64, quantum=2)
    apart = trained(bounds=bounds)
    fixed = dataclasses.replace(bounds, total_low=np.array(64), total_high=np.array(64))
    # A window of steps of 64 samples a worker has twice as many rounds of 32.
    together = trained(meet="gradients", averaging=None, bounds=fixed, interval=2 * INTERVAL)
    np.testing.assert_array_equal(apart.counts, together.counts)
    np.testing.assert_allclose(apart.loss, together.loss, rtol=1e-9)


def test_a_run_repeats_to_the_last_bit_and_leaves_global_random_state_alone() -> None:
    def trained(seed: int) -> tuple[VirtualRun, Tensor]:
        with virtual({"adam": True}, policy="dynamix") as cluster:
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            run = cluster.run(12)
            assert torch.equal(before, torch.get_rng_state())
            return run, weights(cluster.model)

    first, second = trained(1), trained(2)
    np.testing.assert_array_equal(first[0].loss, second[0].loss)
    np.testing.assert_array_equal(first[0].time_s, second[0].time_s)
    assert torch.equal(first[1], second[1])


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
