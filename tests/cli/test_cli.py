import functools
import json
import os
import resource

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.cli.console import read_token
from tests import processes

runner = CliRunner()


def call(*arguments, **options):
    return runner.invoke(app, list(arguments), **options)


EVERY = ("", "demo", "emulate", "bench", "bench overhead", "bench experiment", "policy train", "doctor")


@pytest.mark.parametrize("command", EVERY)
def test_every_command_explains_itself(command):
    assert call(*command.split(), "--help").exit_code == 0


@pytest.mark.parametrize("command", ["observe", "compare", "emulate"])
def test_the_usage_of_what_starts_a_job_has_its_command_last(command):
    usage = call(command, "--help", env={"COLUMNS": "120"}).stdout.strip().splitlines()[0]
    assert "[OPTIONS]" in usage
    assert usage.strip(" .]").endswith("-- COMMAND")


def test_version_is_printed_by_the_installed_command():
    assert processes.run("-m", "dynamix.cli.app", "--version").stdout[:10] == "dynamix 0."


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
        (["aggregator", "--token-file", "none"], ["token_file='none'", "can be read"]),
        (["compare", "/proc/self", "/proc/1"], ["starts a job", "write dynamix report /proc/self /proc/1"]),
        (["compare", "a/events.jsonl"], ["starts a job", "write dynamix report a/events.jsonl"]),
        (["compare", "--", "torchrum", "train.py"], ["command='torchrum'", "can be started"]),
        (
            ["observe", "train.py"],
            ["command='train.py'", "write dynamix observe -- torchrun --nproc-per-node 4 train.py"],
        ),
        (["policy", "train", "--out", "policy.pt"], ["policy.pt", ".safetensors"]),
        (["demo", "--mechanism", "magic"], ["mechanism='magic'", "duty-cycle"]),
        (["emulate", "demo", "--mechanism", "magic", "--", "true"], ["mechanism='magic'", "duty-cycle"]),
        (["emulate", "nowhere", "--", "true"], ["nowhere"]),
        (["bench", "overhead", "--out", "/proc/run"], ["/proc/run", "folder that can be made"]),
        (["exporter", "runs/mine", "--port", "9642"], ["removed in 0.3: write python examples/exporter.py"]),
        (["policy", "explain", "dynamix", "--out", "page.html"], ["removed in 0.3: write `dynamix policy show NAME`"]),
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


def test_a_full_disk_is_one_line_and_nothing_is_left(tmp_path):
    full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0))  # the kernel refuses every byte
    command = ["-m", "dynamix.cli.app", "observe", "--out", tmp_path / "run", "--", "true"]
    done = processes.call(*command, preexec_fn=full)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: [Errno 27] File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_never_written_into(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    result = call("demo", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "new or empty" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty folder, to work in, beside scenarios that cannot be had here."""
    hosts = "hosts: [{cpu: 0.5, rate_mbit_s: 10}, {cpu: 0.5}]"  # loopback has no link rates
    (tmp_path / "rated.yaml").write_text(f"{hosts}\ndevice: {{fixed_ms: 20, per_sample_ms: 1}}")
    (tmp_path / "bad.yaml").write_text("hosts: [{cpu: 0.5}]\nspeed: 3")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize(
    ("line", "cores", "said"),
    [
        ("demo --scenario ../bad.yaml", None, "speed"),
        ("bench overhead", {0}, "core"),
        ("emulate demo -- true", {0}, "core"),
        ("demo --mechanism duty-cycle --quick --scenario ../rated.yaml", None, "rate_mbit_s"),
        ("emulate --mechanism duty-cycle ../rated.yaml -- true", None, "rate_mbit_s"),
    ],
)
def test_what_the_scenario_or_the_machine_does_not_allow_is_said_and_leaves_no_folder(
    line, cores, said, work, monkeypatch
):
    if cores:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    result = call(*line.split())
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert said in result.stderr
    assert list(work.iterdir()) == []


def test_an_empty_folder_that_was_there_before_stays(work):
    (work / "mine").mkdir()
    line = "emulate ../rated.yaml --mechanism duty-cycle --out mine -- true"
    assert call(*line.split()).exit_code == 2
    assert [p.name for p in work.iterdir()] == ["mine"]


def test_the_time_of_a_decision_with_its_events_line_is_told_without_ranks():
    line = "bench overhead --decision-only --workers 4,16 --policies goodput --quick --json"
    found = json.loads(call(*line.split()).stdout)
    few, many = (found["decision_ms"]["goodput"][workers] for workers in ("4", "16"))
    assert 0 < few["decision"] + few["line"] <= 1.5 * few["cpu"] <= 1.5 * few["cpu_p99"]
    assert few["line_bytes"] < many["line_bytes"] < 4 * few["line_bytes"]
    assert found["goal"]["decision_cpu_ms"] == 5.0


@pytest.mark.parametrize(("mode", "said"), [(0o644, "may read the token: chmod 600"), (0o600, "")])
def test_a_token_that_others_may_read_is_warned_of(mode, said, tmp_path, capsys):
    file = tmp_path / "token"
    file.write_text("sixteen letters!\n")
    file.chmod(mode)
    assert read_token(file) == "sixteen letters!"
    warned = capsys.readouterr().err
    assert said in warned if said else not warned
