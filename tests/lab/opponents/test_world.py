"""Worlds of the virtual clock against times that a hand computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix_lab.emulator import Change, Device, Host, Neighbour, Scenario, Trace, load_scenario
from dynamix_lab.opponents.buckets import GradientBucket, gradient_buckets
from dynamix_lab.opponents.course import Course
from dynamix_lab.opponents.world import DeviceWorld, LiveExtras, Outage
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.virtual.cluster import VirtualCluster
from tests.refused import refused
from tests.union import Watching

BARE = LiveExtras(step_s=0.0, stage_s=0.0, jitter_sd=0.0)
DEVICE = Device(fixed_ms=20, per_sample_ms=0.5)


def _scenario(*speeds: float, rate: float | None = None, **more: Any) -> Scenario:
    hosts = tuple(Host(cpu=speed, rate_mbit_s=rate) for speed in speeds)
    return Scenario(hosts=hosts, **({"device": DEVICE} | more))


def _world(scenario: Scenario, *, buckets: tuple[GradientBucket, ...] = (), **more: Any) -> DeviceWorld:
    settings: dict[str, Any] = {"seed": 0, "batch_size": 40, "extras": BARE} | more
    return DeviceWorld(scenario, buckets=buckets, **settings)


def test_work_over_many_changes_is_the_integral_of_speed() -> None:
    trace = Trace(times_s=(0.0, 2.0), factors=((1.0, 1.0), (0.5, 1.0)), repeat_s=4.0)
    world = _world(_scenario(0.8, 1.0, trace=trace, disturbances=(Neighbour(kind="neighbour", every_s=3, factor=0.5),)))
    end_s = world.finish_s(0, 6.0, 0.7)
    grid = np.arange(0.7, end_s, 4e-3)
    done = sum(Course(world.scenario, 0).at(float(t)).speeds[0] for t in grid) * 4e-3
    assert done == pytest.approx(6.0, abs=0.02)


def test_costs_of_samples_are_charged_to_their_worker_for_one_step() -> None:
    device = Device(fixed_ms=10, per_sample_ms=0, per_cost_ms=2)
    world = _world(_scenario(1.0, 1.0, device=device))
    world.charge(np.array([[5.0, 50.0]]))
    assert world.advance()[0][0].tolist() == pytest.approx([0.02, 0.11])
    assert world.advance()[0][0].tolist() == pytest.approx([0.01, 0.01])


def test_exchange_is_the_ring_over_the_slowest_link_and_its_stages() -> None:
    scenario = _scenario(1.0, 1.0, 1.0, 1.0, rate=100, schedule=(Change(at_s=10.0, host=2, rate_mbit_s=10),))
    world = _world(scenario, extras=LiveExtras(step_s=0.0, stage_s=0.001, jitter_sd=0.0))
    # 2 * 3/4 of 8 Mbit is 12 Mbit; six stages
    assert world.meeting_s(1_000_000, 0.0) == pytest.approx(0.12 + 0.006)
    assert world.meeting_s(1_000_000, 20.0) == pytest.approx(1.2 + 0.006)
    # 0.054 s at 100 Mbit/s, then 6.6 Mbit at 10
    assert world.meeting_s(1_000_000, 9.94) == pytest.approx(0.06 + 0.66, abs=1e-4)
    late = _world(Scenario(hosts=(Host(cpu=1.0, latency_ms=5), Host(cpu=1.0)), device=DEVICE))
    assert late.meeting_s(1000, 0.0) == pytest.approx(2 * 0.005)
    alone = _world(_scenario(1.0, rate=1), buckets=(GradientBucket(10**6, 1.0),))
    assert alone.meeting_s(10**6, 0.0) == 0.0
    assert alone.advance()[1].tolist() == pytest.approx([0.04])


def test_one_bucket_hides_nothing_and_two_hide_what_is_ready_before() -> None:
    scenario = _scenario(1.0, 1.0, rate=100)  # two workers: 1 MB takes 0.08 s
    one = _world(scenario, buckets=(GradientBucket(500_000, 1.0),))
    two = _world(scenario, buckets=(GradientBucket(250_000, 0.5), GradientBucket(250_000, 1.0)))
    assert one.advance()[1].tolist() == pytest.approx([0.04 + 0.04])
    assert two.advance()[1].tolist() == pytest.approx([0.04 + 0.02])
    waits = _world(scenario, buckets=(GradientBucket(1_000_000, 0.5), GradientBucket(250_000, 1.0)))
    assert waits.advance()[1].tolist() == pytest.approx([0.02 + 0.08 + 0.02])


def test_lost_host_begins_its_step_anew_on_its_replacement() -> None:
    scenario = _scenario(1.0, 1.0, schedule=(Change(at_s=5.0, host=0, cpu=0.5),))
    world = _world(scenario, outages=[Outage(0, 0.03, 5.0)])
    assert world.finish_s(0, 0.02, 0.0) == pytest.approx(0.02)
    assert world.finish_s(0, 0.04, 0.0) == pytest.approx(5.0 + 0.08)
    assert world.finish_s(0, 0.04, 2.0) == pytest.approx(5.0 + 0.08)
    assert world.finish_s(0, 0.04, 5.0) == pytest.approx(5.0 + 0.08)
    assert world.finish_s(1, 0.04, 0.0) == pytest.approx(0.04)
    assert world.advance()[1].tolist() == pytest.approx([5.08])
    world = _world(_scenario(1.0, 1.0), outages=[Outage(0, 0.0, 5.0)])
    world.apply(np.array([[0, 40]]))  # nobody waits for who has no samples
    busy, whole = world.advance()
    assert busy[0].tolist() == pytest.approx([0.0, 0.04])
    assert whole.tolist() == pytest.approx([0.04])


def test_impossible_worlds_are_refused() -> None:
    for outage in (Outage(2, 0, 1), Outage(0, 2, 1), Outage(0, -1, 1), Outage(0, 1, float("inf"))):
        refused(ConfigError, "outage", _world, _scenario(1.0, 1.0), outages=[outage])
    refused(ConfigError, "device", _world, load_scenario("even"))
    for costs in ([1.0], [float("nan")] * 64, [-1.0] * 64):
        refused(ConfigError, "sample_costs", _cluster, _world(_scenario(1.0, 0.5)), batch_size=4, sample_costs=costs)


NET = nn.Linear(3, 1)


def _cluster(world: DeviceWorld, **options: Any) -> VirtualCluster:
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.zeros(64, 1))
    optimizer = torch.optim.SGD(NET.parameters(), lr=0.01)
    return VirtualCluster(NET, optimizer, nn.functional.mse_loss, data, clusters=world, **options)


def test_training_on_it_meets_the_costs_of_its_samples_and_measures_all_that_a_live_job_does() -> None:
    device = Device(fixed_ms=10, per_sample_ms=1, per_cost_ms=1)
    world = _world(_scenario(1.0, 0.5, rate=10, device=device), batch_size=4, buckets=gradient_buckets(NET))
    costs, policy = np.arange(64.0), Watching([[4, 4]])
    with _cluster(world, policy=policy, batch_size=4, interval=2, sample_costs=costs) as cluster:
        run = cluster.run(steps=8)  # one epoch: every sample once
    passes = run.compute_s * [1.0, 0.5] - 0.010 - 0.004
    assert passes.sum() == pytest.approx(costs.sum() / 1000)
    assert run.time_s[-1] == pytest.approx(float(world.clock_s[0]))
    window = policy.windows[-1]
    for name in ("compute", "communication", "wait", "cpu", "memory", "bytes_per_s", "retransmits_per_s", "rtt_s"):
        assert np.isfinite(getattr(window, name)).all(), name


def test_a_round_apart_takes_every_workers_steps_and_one_meeting() -> None:
    extras = LiveExtras(step_s=0.001, stage_s=0.0, jitter_sd=0.005)
    device = Device(fixed_ms=20, per_sample_ms=0.5, per_cost_ms=2.0)
    world = _world(_scenario(1.0, 0.5, rate=8.0, device=device), extras=extras)
    world.apply(np.array([[60, 20]]))
    world.charge(np.array([[5.0, 0.0]]))
    busy, whole = world.advance_apart(RoundApart([[20, 40], [20]], 100_000, 1))
    assert busy[0].tolist() == pytest.approx([0.04 + 0.03 + 0.01 + 0.002, 0.06 + 0.001])
    assert whole.tolist() == pytest.approx([0.082 + 0.1])  # W = 2: as many bytes as each sends
    assert float(world.clock_s[0]) == pytest.approx(0.182)
    assert world.host_figures(busy, whole, 1)["bytes_per_s"][0] == pytest.approx(100_000 / 0.182)
    busy, whole = world.advance_apart(RoundApart([[], [20]], 0, 1))
    assert busy[0].tolist() == pytest.approx([0.0, 0.061])
    assert whole.tolist() == pytest.approx([0.061])
