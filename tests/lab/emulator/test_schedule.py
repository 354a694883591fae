from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import ScenarioError
from dynamix_lab.emulator.loading import load_scenario
from dynamix_lab.emulator.scenario import check_machine
from dynamix_lab.emulator.schedule import Link, disturbed_hosts, host_links, host_speeds, next_change_s, noise_cores

NEIGHBOUR = {"kind": "neighbour", "every_s": 15, "factor": 0.5}

factor, every_s = st.floats(0.05, 0.95), st.floats(0.5, 100.0)
neighbours = st.fixed_dictionaries(
    {"kind": st.just("neighbour"), "every_s": every_s, "factor": factor, "seed": st.integers(0, 5)}
)
loads = st.fixed_dictionaries(
    {"kind": st.just("load"), "hosts": st.sampled_from([None, [0]]), "factor": factor, "every_s": every_s}
    | {"traffic_mbit_s": st.floats(0.0, 5.0), "probability": st.floats(0.1, 1.0)}
    | {"start_s": st.floats(0.0, 100.0), "end_s": st.none() | st.floats(100.5, 200.0)}
)
changes = st.fixed_dictionaries(
    {"at_s": st.floats(0.0, 500.0), "host": st.none() | st.just(0)}
    | {"cpu": st.floats(0.02, 4.0), "rate_mbit_s": st.floats(50.0, 100.0)}
)


@st.composite
def scenarios(draw: Any) -> Any:
    cpus = draw(st.lists(st.floats(0.02, 4.0), min_size=1, max_size=6))
    content: dict[str, Any] = {
        "hosts": [{"cpu": c} for c in cpus],
        "disturbances": draw(st.lists(neighbours | loads, max_size=3)),
        "schedule": sorted(draw(st.lists(changes, max_size=4)), key=lambda change: change["at_s"]),
    }
    if draw(st.booleans()):
        times = sorted({0.0, *draw(st.lists(st.floats(0.001, 90.0), max_size=5))})
        factor = st.floats(0.05, 1.0)
        row = st.lists(factor, min_size=len(cpus), max_size=len(cpus))
        content["trace"] = {
            "times_s": times,
            "factors": draw(st.lists(row, min_size=len(times), max_size=len(times))),
            "repeat_s": draw(st.sampled_from([None, 90.7])),
        }
    return load_scenario(content)


@settings(deadline=None)
@given(scenarios(), st.floats(0.0, 1000.0), st.integers(0, 3))
def test_job_and_noise_share_exactly_the_hosts_cores(scenario: Any, t_s: float, seed: int) -> None:
    speeds, noise = host_speeds(scenario, t_s, seed), noise_cores(scenario, t_s, seed)
    assert all(speed > 0 for speed in speeds)
    assert all(cores >= 0 for cores in noise)
    quiet = scenario.model_copy(update={"disturbances": ()})
    assert [a + b for a, b in zip(speeds, noise, strict=True)] == pytest.approx(host_speeds(quiet, t_s, seed))
    assert sum(speeds) + sum(noise) <= scenario.total_cores + 1e-9


@settings(deadline=None)
@given(scenarios(), st.floats(0.0, 1000.0), st.integers(0, 3))
def test_nothing_changes_before_the_next_change(scenario: Any, t_s: float, seed: int) -> None:
    def state(at_s: float) -> Any:
        return host_speeds(scenario, at_s, seed), host_links(scenario, at_s, seed), noise_cores(scenario, at_s, seed)

    change = next_change_s(scenario, t_s)
    if change is None:
        assert state(t_s + 1e4) == state(t_s)
    else:
        assert change > t_s
        if change - t_s > 1e-5:  # times are exact to the microsecond
            assert state(t_s + 0.999 * (change - t_s) - 1e-6) == state(t_s)


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 8), st.integers(0, 10), st.integers(1, 60))
def test_a_neighbour_never_stays_and_comes_to_every_host(hosts: int, seed: int, visits: int) -> None:
    scenario = load_scenario({"hosts": [{"cpu": 0.1}] * hosts, "disturbances": [NEIGHBOUR]})
    order = [disturbed_hosts(scenario, 0, 15.0 * k, seed)[0] for k in range(visits)]
    assert all(a != b for a, b in pairwise(order))
    assert {disturbed_hosts(scenario, 0, 15.0 * k, seed)[0] for k in range(50 * hosts)} == set(range(hosts))


def test_a_load_comes_and_goes_and_bursts_as_often_as_it_says() -> None:
    steady = {"kind": "load", "hosts": [1], "factor": 0.5, "start_s": 3, "end_s": 7}
    bursts = {"kind": "load", "factor": 0.8, "traffic_mbit_s": 2, "probability": 0.3, "every_s": 2, "start_s": 10}
    scenario = load_scenario({"hosts": [{"cpu": 0.4}] * 3, "disturbances": [steady, bursts]})
    assert [host_speeds(scenario, t)[1] for t in (0, 2.9, 3, 6.9, 7, 9.9)] == [0.4, 0.4, 0.2, 0.2, 0.4, 0.4]
    assert [next_change_s(scenario, t) for t in (0, 2, 3.5, 6.5)] == [2, 3, 4, 7]
    slots = [disturbed_hosts(scenario, 1, 10 + 2 * k, seed=4) for k in range(2000)]
    often = [sum(host in slot for slot in slots) / 2000 for host in range(3)]
    assert often == pytest.approx([0.3] * 3, abs=0.04)
    together = sum(len(slot) == 3 for slot in slots) / 2000
    assert together == pytest.approx(0.027, abs=0.015)  # each host by itself
    assert any(
        link.background_mbit_s == 2 for link in host_links(scenario, 12.0 + 2 * slots.index(slots[1]), 4)
    ) == bool(slots[1])


def test_a_schedule_sets_and_keeps_values_and_counts_from_the_clock() -> None:
    content = {
        "hosts": [{"cpu": 0.5, "rate_mbit_s": 50, "rate_up_mbit_s": 10}, {"cpu": 0.3}],
        "schedule": [
            {"at_s": 4, "host": 0, "cpu": 0.2, "loss": 0.01},
            {"at_s": 4, "host": 1, "cpu": 0.6},
            {"at_s": 9.5, "rate_mbit_s": 5, "latency_ms": 20},
            {"at_s": 12, "host": 0, "rate_up_mbit_s": 3, "loss": 0},
        ],
    }
    scenario = load_scenario(content)
    assert [host_speeds(scenario, t) for t in (0, 3.99, 4, 100)] == [[0.5, 0.3], [0.5, 0.3], [0.2, 0.6], [0.2, 0.6]]
    assert host_links(scenario, None) == [Link(10, 50), Link()]
    assert host_links(scenario, 5) == [Link(10, 50, loss=0.01), Link()]
    assert host_links(scenario, 10) == [Link(5, 5, 0.01, 20), Link(5, 5, 0, 20)]
    assert host_links(scenario, 20) == [Link(3, 5, 0, 20), Link(5, 5, 0, 20)]
    assert [next_change_s(scenario, t) for t in (0, 4, 9.5, 12)] == [4, 9.5, 12, None]
    assert scenario.total_cores == pytest.approx(0.8)  # changes of the same time are one
    with pytest.raises(ScenarioError, match=r"schedule\[1\].cpu=0.6 .* at most 0.5"):
        check_machine(scenario, 0.5)


def test_a_trace_scales_speeds_or_rates_and_begins_again() -> None:
    trace = {"times_s": [0, 2, 6], "factors": [[1, 1], [0.5, 1], [1, 0.25]], "repeat_s": 10}
    scenario = load_scenario({"hosts": [{"cpu": 0.4}, {"cpu": 0.2}], "trace": trace})
    expected = {0: [0.4, 0.2], 2: [0.2, 0.2], 5.9: [0.2, 0.2], 6: [0.4, 0.05], 10: [0.4, 0.2], 12: [0.2, 0.2]}
    expected[10_006] = [0.4, 0.05]
    assert {t: host_speeds(scenario, t) for t in expected} == expected
    assert [next_change_s(scenario, t) for t in (0, 2, 6, 10, 11)] == [2, 6, 10, 12, 12]
    rates = [{"cpu": 0.4, "rate_mbit_s": 40}, {"cpu": 0.2, "rate_mbit_s": 20}]
    scenario = load_scenario({"hosts": rates, "trace": {**trace, "scales": "rate"}})
    assert host_speeds(scenario, 2) == [0.4, 0.2]
    assert host_links(scenario, 2) == [Link(20, 20), Link(20, 20)]
    assert host_links(scenario, None) == [Link(40, 40), Link(20, 20)]
