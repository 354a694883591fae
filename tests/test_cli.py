import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dynamix.cli import app

runner = CliRunner()


def call(*arguments):
    return runner.invoke(app, list(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["demo"],
        ["emulate"],
        ["bench"],
        ["bench", "overhead"],
        ["bench", "simspeed"],
        ["policy", "train"],
        ["doctor"],
    ],
)
def test_every_command_explains_itself(arguments):
    assert call(*arguments, "--help").exit_code == 0


def test_version_is_printed_by_the_installed_command():
    done = subprocess.run(
        [sys.executable, "-m", "dynamix.cli", "--version"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout[:10]) == (0, "dynamix 0.")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--seeds", "0"], ["seeds=0", "1 or more"]),
        (["demo", "--steps", "0"], ["steps=0", "1 or more"]),
        (["demo", "--seed", "9001"], ["seed=9001", "another"]),
        (["demo", "--seed", "-1"], ["seed=-1", "0 to 2147483647"]),
        (["demo", "--scenario", "nowhere"], ["scenario='nowhere'", "demo"]),
        (["demo", "--policy", "missing.safetensors"], ["missing.safetensors", "existing file"]),
        (["emulate", "demo"], ["command", "after --"]),
        (["policy", "evaluate", "nonsense"], ["policy='nonsense'", "static"]),
        (["policy", "show", "missing.safetensors"], ["missing.safetensors"]),
        (["policy", "train", "--out", "nowhere/p.safetensors"], ["nowhere/p.safetensors"]),
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
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bad.yaml"]


def test_doctor_says_what_is_there_as_json():
    found = json.loads(call("doctor", "--json").stdout)
    assert {e["name"] for e in found["areas"]["probes"]} >= {"timing", "host", "network"}
    assert all(e["detail"] for entries in found["areas"].values() for e in entries)
    assert call("doctor").exit_code == 0


def test_the_shipped_policy_can_be_inspected():
    assert json.loads(call("policy", "show", "--json").stdout)["schema"] == 1
