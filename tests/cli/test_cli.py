import json
import os

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from tests.processes import run

runner = CliRunner()


def call(*arguments):
    return runner.invoke(app, list(arguments))


EVERY = ("", "demo", "emulate", "bench", "bench overhead", "bench experiment", "policy train", "doctor")


@pytest.mark.parametrize("command", EVERY)
def test_every_command_explains_itself(command):
    assert call(*command.split(), "--help").exit_code == 0


def test_version_is_printed_by_the_installed_command():
    assert run("-m", "dynamix.cli.app", "--version").stdout[:10] == "dynamix 0."


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--seeds", "0"], ["seeds=0", "1 or more"]),
        (["demo", "--rows", "static,dbs"], ["rows='dbs'", "static, lb_bsp, balance, adapt, single"]),
        (["demo", "--scenario", "paper-like"], ["place='paper-like/", "device hosts", "device-even"]),
        (["demo", "--rows", "static", "--policy", "goodput"], ["policy='goodput'", "--rows"]),
        (["demo", "--seed", "-1"], ["seed=-1", "0 or more"]),
        (["demo", "--scenario", "nowhere"], ["scenario='nowhere'", "demo"]),
        (["demo", "--policy", "missing.safetensors"], ["missing.safetensors", "existing file"]),
        (["emulate", "demo"], ["command", "after --"]),
        (["policy", "evaluate", "nonsense"], ["policy='nonsense'", "static"]),
        (["policy", "show", "missing.safetensors"], ["missing.safetensors"]),
        (["policy", "train", "--out", "nowhere/p.safetensors"], ["nowhere/p.safetensors"]),
        (["policy", "train", "--out", "/proc/p.safetensors"], ["/proc/p.safetensors", "can be written"]),
        (["aggregator", "--host", "0.0.0.0"], ["host='0.0.0.0'", "--token-file", "--tls-cert", "--tls-ca"]),
        (["aggregator", "--tls-cert", "cert.pem"], ["tls_key", "all three"]),
        (["aggregator", "--jobs", "0"], ["jobs=0"]),
        (["policy", "train", "--out", "policy.pt"], ["policy.pt", ".safetensors"]),
        (["demo", "--mechanism", "magic"], ["mechanism='magic'", "duty-cycle"]),
        (["emulate", "demo", "--mechanism", "magic", "--", "true"], ["mechanism='magic'", "duty-cycle"]),
        (["emulate", "nowhere", "--", "true"], ["nowhere"]),
        (["bench", "overhead", "--out", "/proc/run"], ["/proc/run", "folder that can be made"]),
    ],
)
def test_bad_input_is_one_line_on_stderr_exit_code_2_and_nothing_left(arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for text in named:
        assert text in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_never_written_into(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    result = call("demo", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "new or empty" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("scenario", ["hosts: [{cpu: 0}]", "hosts: [{cpu: 0.5}]\nspeed: 3"])
def test_a_bad_scenario_is_explained(scenario, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(scenario)
    result = call("demo", "--scenario", "bad.yaml")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.yaml"]


COMMANDS = (["bench", "overhead"], ["emulate", "demo", "--", "true"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_machine_that_is_too_small_leaves_no_folder(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    result = call(*command)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "core" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [["demo", "--quick", "--scenario", "../rated.yaml"], ["emulate", "../rated.yaml", "--", "true"]],
    ids=lambda command: command[0],
)
def test_what_the_machine_refuses_leaves_no_folder(command, tmp_path, monkeypatch):
    hosts = "hosts: [{cpu: 0.5, rate_mbit_s: 10}, {cpu: 0.5}]"
    (tmp_path / "rated.yaml").write_text(f"{hosts}\ndevice: {{fixed_ms: 20, per_sample_ms: 1}}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    result = call(*command[:1], "--mechanism", "duty-cycle", *command[1:])  # loopback has no link rates
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "rate_mbit_s" in result.stderr
    assert list((tmp_path / "work").iterdir()) == []


def test_an_empty_folder_that_was_there_before_stays(tmp_path, monkeypatch):
    (tmp_path / "rated.yaml").write_text("hosts: [{cpu: 0.5, rate_mbit_s: 10}, {cpu: 0.5}]")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert call("emulate", "rated.yaml", "--mechanism", "duty-cycle", "--out", "mine", "--", "true").exit_code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "rated.yaml"]


def test_the_time_of_a_decision_with_its_events_line_is_told_without_ranks():
    line = "bench overhead --decision-only --workers 4,16 --policies goodput --quick --json"
    found = json.loads(call(*line.split()).stdout)
    few, many = (found["decision_ms"]["goodput"][workers] for workers in ("4", "16"))
    assert 0 < few["decision"] + few["line"] <= 1.5 * few["cpu"] <= 1.5 * few["cpu_p99"]
    assert few["line_bytes"] < many["line_bytes"] < 4 * few["line_bytes"]
    assert found["goal"]["decision_cpu_ms"] == 5.0
