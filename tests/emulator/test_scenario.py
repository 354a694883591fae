from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.emulator.scenario import (
    check_machine,
    host_speeds,
    load_scenario,
    next_change_s,
    noise_shares,
    shipped_scenarios,
    visited_host,
)
from dynamix.errors import ScenarioError

NEIGHBOUR = {"kind": "neighbour", "every_s": 15, "factor": 0.5}

neighbours = st.fixed_dictionaries(
    {
        "kind": st.just("neighbour"),
        "every_s": st.floats(0.5, 100.0),
        "factor": st.floats(0.05, 0.95),
        "seed": st.integers(0, 5),
    }
)
scenarios = st.builds(
    lambda cpus, noise: load_scenario({"hosts": [{"cpu": c} for c in cpus], "disturbances": noise}),
    st.lists(st.floats(0.02, 4.0), min_size=1, max_size=8),
    st.lists(neighbours, max_size=3),
)


@pytest.mark.parametrize(
    ("content", "named", "allowed"),
    [
        ({"hosts": [{"cpu": 0}]}, "hosts[0].cpu=0", "0.02 or more"),
        ({"hosts": [{"cpu": -1.5}]}, "hosts[0].cpu=-1.5", "0.02 or more"),
        ({"hosts": [{"cpu": 0.5}, {"cpu": math.nan}]}, "hosts[1].cpu=nan", "finite number"),
        ({"hosts": [{"cpu": "half"}]}, "hosts[0].cpu='half'", "number"),
        ({"hosts": [{"cpu": True}]}, "hosts[0].cpu=True", "number"),
        ({"hosts": [{"cpu": 0.5, "rate_mbit_s": 0}]}, "hosts[0].rate_mbit_s=0", "0.1 or more"),
        ({"hosts": [{"cpu": 0.5, "ram": 2}]}, "unknown key hosts[0].ram=2", "cpu, rate_mbit_s"),
        ({"hosts": [{}]}, "hosts[0].cpu", "missing"),
        ({"hosts": [{"cpu": 0.5}], "hots": 1}, "unknown key hots=1", "hosts, disturbances"),
        ({"hosts": []}, "hosts=[]", "1 or more entries"),
        ({"hosts": [{"cpu": 0.02}] * 65}, "hosts=", "64 or fewer"),
        ({}, "hosts", "missing"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**NEIGHBOUR, "factor": 1.0}]}, "factor=1.0", "0.95 or less"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**NEIGHBOUR, "every_s": 0}]}, "every_s=0", "0.5 or more"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**NEIGHBOUR, "kind": "x"}]}, "kind='x'", "'neighbour'"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**NEIGHBOUR, "often": 1}]}, "often=1", "every_s, factor, seed"),
    ],
)
def test_a_bad_scenario_is_refused_with_value_range_and_fix(content: dict[str, Any], named: str, allowed: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(content)
    message = str(caught.value)
    assert named in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["hosts: [", "- 1\n- 2\n", "", "hosts: 3"])
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError):
        load_scenario(path)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ScenarioError, match="demo, even"):
        load_scenario("dmeo")


def test_more_cores_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"hosts\[0\].cpu=3.0 .* at most 2"):
        check_machine(load_scenario({"hosts": [{"cpu": 3}]}), 2)
    with pytest.raises(ScenarioError, match=r"sum of hosts' cpu=3.0 .* at most 2"):
        check_machine(load_scenario({"hosts": [{"cpu": 1.5}, {"cpu": 1.5}]}), 2)
    check_machine(load_scenario({"hosts": [{"cpu": 1}, {"cpu": 1}]}), 2)


def test_shipped_scenarios_load_and_the_demo_is_frozen() -> None:
    for name in shipped_scenarios():
        assert load_scenario(name).name == name
    demo = load_scenario("demo")
    assert [host.cpu for host in demo.hosts] == [0.56, 0.42, 0.25, 0.17]
    assert demo.sha256 == "52d2ba5c23962cc7810a3df61eebeb357e92be46d50586cfdc04a6acc767cd19"
    assert [visited_host(demo, 0, 15.0 * k, 1000) for k in range(8)] == [0, 1, 0, 2, 0, 1, 2, 3]


def test_the_hash_is_of_what_is_emulated(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("disturbances: []\nhosts:\n - rate_mbit_s: 20\n   cpu: 0.5\n")
    from_file = load_scenario(path)
    assert from_file.name == "mine"
    assert from_file.sha256 == load_scenario({"hosts": [{"cpu": 0.5, "rate_mbit_s": 20.0}]}).sha256
    assert from_file.sha256 != load_scenario({"hosts": [{"cpu": 0.5}]}).sha256


@settings(deadline=None)
@given(scenarios, st.floats(0.0, 1000.0), st.integers(0, 3))
def test_job_and_noise_share_exactly_the_hosts_cores(scenario: Any, t_s: float, seed: int) -> None:
    together = host_speeds(scenario, t_s, seed)
    assert all(0 < speed <= host.cpu for speed, host in zip(together, scenario.hosts, strict=True))
    for host, cores in noise_shares(scenario, t_s, seed):
        assert cores > 0
        together[host] += cores
    assert together == pytest.approx([host.cpu for host in scenario.hosts])


@settings(deadline=None)
@given(scenarios, st.floats(0.0, 1000.0), st.integers(0, 3))
def test_nothing_changes_before_the_next_change(scenario: Any, t_s: float, seed: int) -> None:
    change = next_change_s(scenario, t_s)
    now = host_speeds(scenario, t_s, seed)
    if change is None:
        assert host_speeds(scenario, t_s + 1e4, seed) == now
    else:
        assert change > t_s
        between = t_s + 0.999 * (change - t_s)
        assert host_speeds(scenario, between, seed) == now


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 10), st.integers(1, 60))
def test_a_neighbour_never_stays_and_comes_to_every_host(hosts: int, seed: int, visits: int) -> None:
    scenario = load_scenario({"hosts": [{"cpu": 0.1}] * hosts, "disturbances": [NEIGHBOUR]})
    order = [visited_host(scenario, 0, 15.0 * k, seed) for k in range(visits)]
    assert all(a != b for a, b in pairwise(order))
    assert {visited_host(scenario, 0, 15.0 * k, seed) for k in range(50 * hosts)} == set(range(hosts))


def test_seeds_give_different_schedules_and_the_same_seed_the_same() -> None:
    demo = load_scenario("demo")
    orders = {tuple(visited_host(demo, 0, 15.0 * k, seed) for k in range(20)) for seed in range(20)}
    assert len(orders) == 20
