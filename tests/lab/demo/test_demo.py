"""The demo through real namespaces, control groups and gloo processes. Needs root; in CI a skip is a failure."""

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from dynamix.emulator import host_speeds, load_scenario, probe_mechanisms
from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder
from dynamix.policies.learned.policy import PRETRAINED
from dynamix.window import Bounds, Window
from dynamix_lab.demo.run import _facts, run_demo
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.launch import POLICIES, LaunchSettings
from dynamix_lab.harness.reference import Reference
from dynamix_lab.harness.runs import AGAIN


@pytest.fixture(scope="module")
def privileged():
    found = probe_mechanisms()
    missing = "; ".join(why for name in ("network", "cpu") for ok, why in [found[name]] if not ok)
    if missing and (os.environ.get("CI") == "true" or os.environ.get("DYNAMIX_REQUIRE_EMULATOR") == "1"):
        pytest.fail(f"the demo's smoke run is required here, but: {missing}")
    if missing:
        pytest.skip(missing)


@pytest.fixture
def little_data(monkeypatch):
    for name, samples in (("train_samples", 2400), ("test_samples", 200)):
        monkeypatch.setattr(LaunchSettings, name, lambda self, samples=samples: samples)


def ranks_of(pid):
    children = psutil.Process(pid).children(recursive=True)
    return [c for c in children if "dynamix_lab.harness.worker" in " ".join(c.cmdline())]


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_runs_every_policy_to_its_end_and_leaves_a_complete_folder(privileged, tmp_path):
    command = [sys.executable, "-m", "dynamix.cli.app", "demo", "--quick", "--json", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(result["policies"]) == set(POLICIES)
    for policy in result["policies"].values():
        assert policy["steps"] == [16]
        assert sum(policy["batch_sizes"][0]) >= 4 * 8
    static = result["policies"]["static"]
    assert static["batch_sizes"] == [[128, 128, 128, 128]]
    assert result["policies"]["reference"]["batch_sizes"] != static["batch_sizes"]
    assert result["mechanisms"]["network"] == "netns+veth"
    assert result["scenario_sha256"] == load_scenario("demo").sha256
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert {e["policy"] for e in events} == set(POLICIES)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["command"] == "dynamix demo --quick"
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


class KillsARank(Display):
    """Watches the demo and kills one rank once training goes on."""

    killed: psutil.Process | None = None

    def update(self, runs):
        if self.killed is None and runs and runs[-1].step:
            self.killed = ranks_of(os.getpid())[2]
            self.killed.send_signal(signal.SIGKILL)


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_dies_ends_the_demo_with_an_error_that_names_it(privileged, tmp_path):
    settings = LaunchSettings(quick=True, steps=100_000, policies=("static",))
    with pytest.raises(WorkerLostError, match="rank"):
        run_demo(settings, RunFolder("demo", tmp_path / "run"), display=KillsARank(target=1.0))
    assert ranks_of(os.getpid()) == []


class Interrupts(Display):
    """Ctrl-C once the second seed trains."""

    def update(self, runs):
        if len({run.seed for run in runs}) == 2 and runs[-1].step:
            raise KeyboardInterrupt


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupted_call_keeps_its_finished_seeds_and_goes_on_without_repeating_them(
    privileged, tmp_path, little_data
):
    settings = LaunchSettings(quick=True, seeds=2, steps=8, policies=("static",))
    folder = RunFolder("demo", tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run_demo(settings, folder, display=Interrupts(target=1.0))
    partly = json.loads((tmp_path / "run" / "result.json").read_text())
    assert partly["interrupted"] is True
    assert partly["policies"]["static"]["steps"] == [8]
    with pytest.raises(ConfigError, match="settings"):
        run_demo(replace(settings, interval=3), RunFolder("demo", tmp_path / "run", resume=True))
    result, reached = run_demo(settings, RunFolder("demo", tmp_path / "run", resume=True))
    assert reached
    assert result["policies"]["static"]["steps"] == [8, 8]
    assert result["policies"]["static"]["time_s"][0] == partly["policies"]["static"]["time_s"][0]
    assert result["policies"]["static"]["seconds_per_step"][0] == partly["policies"]["static"]["seconds_per_step"][0]
    assert result["a_a"]["pairs"] == 2
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert len(events) == len({(e["policy"], e["seed"], e["window_index"]) for e in events})


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_processor_was_stolen_is_made_again(privileged, tmp_path, monkeypatch, little_data):
    calls = itertools.count()

    def times():  # called when ranks are launched, when a run starts and when it ends
        at = next(calls)
        return 50.0 * min(at, 2), 100.0 * at

    monkeypatch.setattr("dynamix_lab.harness.launch.processor_times", times)
    settings = LaunchSettings(steps=8, again=True, policies=("static",))
    result, reached = run_demo(settings, RunFolder("demo", tmp_path / "run"))
    assert reached
    first, second = settings.order(0)
    assert result["policies"][first]["attempts"] == [2]
    assert result["policies"][second]["attempts"] == [1]
    assert result["policies"][first]["stolen_fraction"] == [0.0]
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert len(events) == len({(e["policy"], e["seed"], e["window_index"]) for e in events})
    assert {e["policy"] for e in events if e.get("attempt") == 1} == {first}
    again, _ = run_demo(settings, RunFolder("demo", tmp_path / "run", resume=True))
    assert again["policies"] == result["policies"]


def test_only_the_folder_of_an_earlier_run_can_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match="the folder of the run to go on with"):
        RunFolder("demo", tmp_path / "nothing", resume=True)


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


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_root_the_demo_runs_by_duty_cycle_and_says_so_and_which_policy_ran(tmp_path):
    copy = tmp_path / "mine.safetensors"
    copy.write_bytes(PRETRAINED.read_bytes())
    copy.with_suffix(".json").write_bytes(PRETRAINED.with_suffix(".json").read_bytes())
    options = ["--quick", "--steps", "4", "--mechanism", "duty-cycle", "--policy", str(copy), "--json"]
    command = [sys.executable, "-m", "dynamix.cli.app", "demo", *options, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["mechanisms"]["network"] == "loopback"
    assert result["mechanisms"]["cpu"].startswith("duty-cycle")
    assert result["settings"]["mechanism"] == "duty-cycle"
    assert {name: part["steps"] for name, part in result["policies"].items()} == {name: [4] for name in POLICIES}
    hashed = hashlib.sha256(PRETRAINED.read_bytes()).hexdigest()
    assert result["policies"]["dynamix"]["policy"] == {"name": str(copy), "sha256": hashed}
    assert str(copy) in done.stderr.replace("\n", "")
    assert str(copy) in (tmp_path / "run" / "report.html").read_text()


def test_results_name_the_policy_that_really_runs_as_dynamix(tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other")
    facts = [
        _facts(LaunchSettings(policy=p), load_scenario("demo"), 0.9) for p in (None, "dynamix", "lb_bsp", str(other))
    ]
    shipped, named, rule, file = (f["settings"]["policy"] for f in facts)
    assert shipped == named
    assert shipped["name"] == "shipped"
    assert rule == {"name": "lb_bsp"}
    assert file["sha256"] != shipped["sha256"]
