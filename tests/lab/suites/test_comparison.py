"""The comparison of policies through real namespaces, control groups and gloo processes. Needs root; in CI a skip is a
failure.
"""

import itertools
import os

import pytest

from dynamix.errors import ConfigError
from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder
from dynamix.window import Bounds, Window
from dynamix_lab.emulator import host_speeds, load_scenario, probe_mechanisms
from dynamix_lab.harness.launch import POLICIES, LaunchSettings
from dynamix_lab.harness.reference import Reference
from dynamix_lab.harness.runs import AGAIN, policy_facts
from dynamix_lab.suites.comparison.run import run_comparison


@pytest.fixture(scope="module")
def privileged():
    found = probe_mechanisms()
    missing = "; ".join(why for name in ("network", "cpu") for ok, why in [found[name]] if not ok)
    if missing and (os.environ.get("CI") == "true" or os.environ.get("DYNAMIX_REQUIRE_EMULATOR") == "1"):
        pytest.fail(f"a run on hosts with quotas is required here, but: {missing}")
    if missing:
        pytest.skip(missing)


@pytest.fixture
def short(monkeypatch):
    for name, value in (("train_samples", 2400), ("test_samples", 200), ("max_steps", 6)):
        monkeypatch.setattr(LaunchSettings, name, lambda self, value=value: value)


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_processor_was_stolen_is_made_again(privileged, tmp_path, monkeypatch, short):
    calls = itertools.count()

    def times():  # called when ranks are launched, when a run starts and when it ends
        at = next(calls)
        return 50.0 * min(at, 2), 100.0 * at

    monkeypatch.setattr("dynamix_lab.harness.launch.processor_times", times)
    settings = LaunchSettings(scenario="even", again=True, policies=("static",))
    result, reached = run_comparison(settings, RunFolder("comparison", tmp_path / "run"))
    assert not reached
    first, second = settings.order(0)
    assert result["policies"][first]["steps"] == [6]
    assert result["policies"][first]["attempts"] == [2]
    assert result["policies"][second]["attempts"] == [1]
    assert result["policies"][first]["stolen_fraction"] == [0.0]
    assert result["mechanisms"]["network"] == "netns+veth"
    assert result["scenario_sha256"] == load_scenario("even").sha256
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert len(events) == len({(e["policy"], e["seed"], e["window_index"]) for e in events})
    assert {e["policy"] for e in events if e.get("attempt") == 1} == {first}
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    again, _ = run_comparison(settings, RunFolder("comparison", tmp_path / "run", resume=True))
    assert again["policies"] == result["policies"]


def test_only_the_folder_of_an_earlier_run_can_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match="the folder of the run to go on with"):
        RunFolder("comparison", tmp_path / "nothing", resume=True)


def test_several_seeds_add_the_a_a_partner_and_put_everybody_first_once():
    assert AGAIN not in LaunchSettings().order(0)
    settings = LaunchSettings(seeds=5)
    orders = [settings.order(seed) for seed in range(5)]
    assert {order[0] for order in orders} == {*POLICIES, AGAIN}


def test_the_reference_follows_the_scenario_at_a_constant_global_batch():
    now = {"s": 0.0}
    reference = Reference("demo", seed=3, clock=lambda: now["s"])
    window = Window.of([128] * 4, compute=0.2, steps=5)
    for time_s in (1.0, 16.0, 31.0, 46.0):
        now["s"] = time_s
        sizes = reference.decide(window, Bounds.of(4, 8, 512))
        speeds = host_speeds(load_scenario("demo"), time_s, 3)
        assert sizes.sum() == 512
        assert sizes.tolist() == pytest.approx([512 * v / sum(speeds) for v in speeds], abs=1)


def test_results_name_the_policy_that_really_runs_as_dynamix(tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other")
    shipped, named, rule, file = (policy_facts(name) for name in (None, "dynamix", "lb_bsp", str(other)))
    assert shipped == named
    assert shipped["name"] == "shipped"
    assert rule == {"name": "lb_bsp"}
    assert file["sha256"] != shipped["sha256"]
