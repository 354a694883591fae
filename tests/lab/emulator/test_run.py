from __future__ import annotations

import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError, EmulationError, ScenarioError
from dynamix.events.background import background_log
from dynamix.events.records import read_events
from dynamix_lab.emulator import emulate, probe_mechanisms, scenario_schema
from dynamix_lab.emulator.control import request
from dynamix_lab.emulator.run import is_connected, summary
from tests.lab.emulator.conftest import PYTHON
from tests.refused import refused

EXAMPLE = Path(__file__).parents[3] / "examples/train.py"
TWO = {"hosts": [{"cpu": 0.3}, {"cpu": 0.3}]}
ASK = """
import os, socket
link = socket.socket(socket.AF_UNIX); link.connect(os.environ["DYNAMIX_EMULATOR_CONTROL"])
link.sendall(b"COMMAND\\n"); print(link.recv(100).decode()); import time; time.sleep(0.5)
"""


@pytest.mark.parametrize(
    "mechanism", [pytest.param("privileged", marks=pytest.mark.emulator), pytest.param("duty-cycle")]
)
def test_a_run_is_recorded_and_the_worst_rank_decides(
    tmp_path: Path, mechanism: str, request: pytest.FixtureRequest
) -> None:
    if mechanism == "privileged":
        request.getfixturevalue("privileged")
    program = "import os, sys; print('hello from', os.environ['RANK']); sys.exit(4 * int(os.environ['RANK']))"
    shown = io.StringIO()
    command = [*PYTHON, program]
    options: dict[str, Any] = {"seed": 5, "throttle_after_s": 0, "mechanism": mechanism}
    result = emulate(TWO, command, out=tmp_path / "run", echo=shown, **options)
    assert (result["exit_code"], result["exit_codes"]) == (4, [0, 4])
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    described = json.loads((tmp_path / "run/run.json").read_text())
    assert described["cluster"] == "emulator"
    assert described["mechanisms"]["cpu"].startswith("cgroup" if mechanism == "privileged" else "duty-cycle")
    assert described["seeds"] == [5]
    assert len(described["scenario_sha256"]) == 64
    assert "torch" in described["versions"]
    assert "hello from 0" in shown.getvalue()
    assert "rank 1 ended with 4" in shown.getvalue()
    held = {str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    ranks = {f"ranks/5/rank{rank}.{kind}" for rank in range(2) for kind in ("out", "err")}
    assert held == {"run.json", "result.json", *ranks}


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.usefixtures("privileged")
def test_the_folder_of_a_script_with_a_controller_holds_its_events(tmp_path: Path) -> None:
    """The last line that a person sees names what the folder holds, and the script need not name an events file."""
    (tmp_path / "two.yaml").write_text("hosts: [{cpu: 0.3}, {cpu: 0.3}]\n")
    out = tmp_path / "run"
    command = [sys.executable, str(EXAMPLE), "--policy", "static", "--epochs", "1"]
    done = CliRunner().invoke(app, ["emulate", str(tmp_path / "two.yaml"), "--out", str(out), "--", *command])
    assert done.exit_code == 0, done.output
    result = json.loads((out / "result.json").read_text())
    said = done.stdout.splitlines()[-1]
    assert said.startswith(f"2 ranks ended with 0 after {result['wall_s']:.1f} s, limits from ")
    events = read_events(out / "events.jsonl")
    assert len(events) > 5
    assert f"{out} holds run.json, result.json, events.jsonl ({len(events)} windows), report.html, ranks/0/" in said
    assert "epoch 0: loss" in (out / "ranks/0/rank0.out").read_text()


def test_a_script_that_names_its_events_file_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIX_EVENTS", str(tmp_path / "given.jsonl"))
    for named, file in ((tmp_path / "chosen.jsonl", "chosen.jsonl"), (None, "given.jsonl")):
        log = background_log(named)
        assert log.path == tmp_path / file
    monkeypatch.delenv("DYNAMIX_EVENTS")
    assert background_log(None) is None


def test_the_last_line_of_an_emulation_says_what_became_of_it(tmp_path: Path) -> None:
    result = {"exit_codes": [0, 4], "wall_s": 2.04, "limited_after_s": None, "folder": str(tmp_path), "seeds": [5]}
    assert summary(result) == (
        f"ranks ended with 0, 4 after 2.0 s, without limits; {tmp_path} holds run.json, result.json, "
        "ranks/5/ (output of every rank)"
    )


def test_a_job_starts_its_own_limits(tmp_path: Path) -> None:
    program = ASK.replace("COMMAND", "start-clock")
    result = emulate(TWO, [*PYTHON, program], out=tmp_path / "run", mechanism="duty-cycle", echo=None)
    assert result["exit_code"] == 0
    assert result["limited_after_s"] < 10
    assert (tmp_path / "run/ranks/0/rank0.out").read_text() == "ok\n"


def test_the_control_socket_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    program = ASK.replace("COMMAND", "self-destruct")
    emulate(TWO, [*PYTHON, program], out=tmp_path / "run", mechanism="duty-cycle", echo=None, throttle_after_s=60)
    assert (tmp_path / "run/ranks/0/rank0.out").read_text() == "unknown command 'self-destruct'\n"


def test_control_outside_an_emulation_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMIX_EMULATOR_CONTROL", raising=False)
    assert not request("start-clock")
    refused(ConfigError, "throttle, unthrottle, start-clock", request, "explode")
    monkeypatch.setenv("DYNAMIX_EMULATOR_CONTROL", "/nowhere/socket")
    refused(EmulationError, "owner", request, "throttle")


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    result = emulate(TWO, ["no-such-program"], out=tmp_path / "run", mechanism="duty-cycle", echo=None)
    assert result["exit_code"] == 127
    assert "no-such-program" in (tmp_path / "run/ranks/0/rank0.err").read_text()


def test_a_timeout_ends_the_job(tmp_path: Path) -> None:
    program = [*PYTHON, "import time; time.sleep(600)"]
    result = emulate(TWO, program, out=tmp_path / "run", mechanism="duty-cycle", echo=None, timeout_s=1.0)
    assert result["exit_codes"] == [-15, -15]
    assert result["exit_code"] == 143


def test_bad_input_makes_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for scenario, command, error in [
        ({"hosts": [{"cpu": 0}]}, ["true"], ScenarioError),
        ("no-such-scenario", ["true"], ScenarioError),
        (TWO, [], ConfigError),
    ]:
        refused(error, "", emulate, scenario, command, out=out)
    refused(ConfigError, "throttle_after_s", emulate, TWO, ["true"], out=out, throttle_after_s=-1)
    assert not out.exists()


def test_a_connection_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert is_connected(os.getpid(), own_host=False)
    assert not is_connected(os.getpid(), own_host=True)  # still in its parent's namespace


@pytest.mark.emulator
@pytest.mark.usefixtures("privileged")
def test_limits_begin_once_every_rank_is_connected(tmp_path: Path) -> None:
    program = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], 5000)
time.sleep(1)
if os.environ["RANK"] == "0":
    peer, _ = socket.create_server(address).accept()
else:
    while True:
        try:
            peer = socket.create_connection(address, 1); break
        except OSError:
            time.sleep(0.05)
time.sleep(1.5)
"""
    result = emulate(TWO, [*PYTHON, program], out=tmp_path / "run", mechanism="privileged", echo=None)
    assert result["exit_code"] == 0
    assert 0.9 < result["limited_after_s"] < 2.6


def test_probing_says_what_is_missing_and_leaves_nothing() -> None:
    before = [name for _, name in socket.if_nameindex()]
    found = probe_mechanisms()
    assert set(found) == {"network", "cpu", "duty-cycle", "rate", "loss", "latency"}
    assert found["duty-cycle"][0]
    assert all(text for _, text in found.values())
    assert [name for _, name in socket.if_nameindex()] == before


def test_the_command_prints_the_schema() -> None:
    printed = CliRunner().invoke(app, ["emulate", "--schema"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == scenario_schema()


@pytest.mark.emulator
@pytest.mark.usefixtures("privileged")
def test_what_the_kernel_lacks_makes_no_folder(tmp_path: Path) -> None:
    if probe_mechanisms()["latency"][0]:
        pytest.skip("this kernel has everything")
    hosts = [{"cpu": 0.3}, {"cpu": 0.3, "latency_ms": 3}]
    refused(ScenarioError, r"hosts\[1\].latency_ms=3", emulate, {"hosts": hosts}, ["true"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
