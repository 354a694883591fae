from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError, EmulationError, ScenarioError
from dynamix_lab.commands.doctor import emulation
from dynamix_lab.emulator import emulate, probe_mechanisms, scenario_schema
from dynamix_lab.emulator.control import request
from dynamix_lab.emulator.launchers import check_command
from dynamix_lab.emulator.run import summary
from tests.lab.emulator.conftest import PYTHON
from tests.refused import refused

TWO = {"hosts": [{"cpu": 0.3}, {"cpu": 0.3}]}


def test_a_run_is_recorded_and_the_worst_rank_decides(tmp_path: Path) -> None:
    program = "import os, sys; print('hello from', os.environ['RANK']); sys.exit(4 * int(os.environ['RANK']))"
    shown = io.StringIO()
    command = [*PYTHON, program]
    options: dict[str, Any] = {"seed": 5, "throttle_after_s": 0, "mechanism": "duty-cycle"}
    result = emulate(TWO, command, out=tmp_path / "run", echo=shown, **options)
    assert (result["exit_code"], result["exit_codes"]) == (4, [0, 4])
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    described = json.loads((tmp_path / "run/run.json").read_text())
    assert described["cluster"] == "emulator"
    assert described["mechanisms"]["cpu"].startswith("duty-cycle")
    assert described["seeds"] == [5]
    assert len(described["scenario_sha256"]) == 64
    assert "torch" in described["versions"]
    assert "hello from 0" in shown.getvalue()
    assert "rank 1 ended with 4" in shown.getvalue()
    held = {str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    ranks = {f"ranks/5/rank{rank}.{kind}" for rank in range(2) for kind in ("out", "err")}
    assert held == {"run.json", "result.json", *ranks}


def test_what_ranks_that_fail_alike_wrote_is_shown_once(tmp_path: Path) -> None:
    shown = io.StringIO()
    command = [*PYTHON, "raise SystemExit('no such data')"]
    emulate(TWO, command, out=tmp_path / "run", echo=shown, throttle_after_s=0, mechanism="duty-cycle")
    assert shown.getvalue().count("no such data") == 1
    assert "ranks 0, 1 ended with 1" in shown.getvalue()


def test_a_job_starts_its_own_limits_and_nothing_unknown(tmp_path: Path) -> None:
    program = """
import os, socket, time
for command in (b"self-destruct\\n", b"start-clock\\n"):
    link = socket.socket(socket.AF_UNIX); link.connect(os.environ["DYNAMIX_EMULATOR_CONTROL"])
    link.sendall(command); print(link.recv(100).decode())
time.sleep(0.5)
"""
    result = emulate(TWO, [*PYTHON, program], out=tmp_path / "run", mechanism="duty-cycle", echo=None)
    assert result["exit_code"] == 0
    assert result["limited_after_s"] is not None
    assert (tmp_path / "run/ranks/0/rank0.out").read_text() == "unknown command 'self-destruct'\nok\n"


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
    assert result["ended_by_timeout_s"] == 1
    assert "s (with the start of the processes), ended by --timeout 1, " in summary(result)


def test_a_timeout_that_did_not_end_the_job_is_not_named(tmp_path: Path) -> None:
    result = emulate(TWO, ["true"], out=tmp_path / "run", mechanism="duty-cycle", echo=None, timeout_s=300.0)
    assert result["ended_by_timeout_s"] is None
    assert "--timeout" not in summary(result)


def test_a_comparison_names_the_rows_that_a_timeout_ended(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(json.dumps(TWO))
    line = ["emulate", str(tmp_path / "two.yaml"), "--compare", "static,goodput", "--mechanism", "duty-cycle"]
    line += ["--timeout", "1", "--out", str(tmp_path / "run"), "--", *PYTHON, "import time; time.sleep(600)"]
    said = CliRunner().invoke(app, line).stdout.splitlines()[-1]
    assert said.startswith("ended by --timeout: static; ")


def test_without_events_the_command_says_that_no_page_is_normal(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(json.dumps(TWO))
    line = ["emulate", str(tmp_path / "two.yaml"), "--mechanism", "duty-cycle", "--out", str(tmp_path / "run")]
    said = CliRunner().invoke(app, [*line, "--", "true"]).stdout
    assert "There is no page: no Controller wrote events, which is normal under observe.\n" in said
    assert "could not be written" not in said


@pytest.mark.parametrize("more", [[], ["--compare", "static"]])
@pytest.mark.parametrize(
    ("command", "named", "instead"),
    [
        ("torchrun --nproc-per-node 3 job.py --epochs 2", "'torchrun'", "python job.py --epochs 2"),
        ("/opt/venv/bin/torchrun job.py", "'torchrun'", "python job.py"),
        ("torchrun -m package.job conf.py", "'torchrun'", "python train.py"),
        ("python -u -m torch.distributed.run --nnodes 1 job.py", "'torch.distributed.run'", "python job.py"),
        ("python3 -m torch.distributed.launch job.py", "'torch.distributed.launch'", "python job.py"),
        ("accelerate launch --num_processes 2 job.py", "'accelerate launch'", "python job.py"),
        ("mpirun -np 3 python job.py", "'mpirun'", "python job.py"),
        ("mpiexec.hydra -n 3 ./job", "'mpiexec.hydra'", "python train.py"),
        ("env A=1 srun -n 3 python job.py", "'srun'", "python job.py"),
    ],
)
def test_a_launcher_is_refused_with_the_line_to_write(
    command: str, named: str, instead: str, more: list[str], tmp_path: Path
) -> None:
    line = ["emulate", "demo", *more, "--out", str(tmp_path / "run"), "--", *command.split()]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: command={named} is not possible: ")
    assert "emulate starts one rank on each host" in done.stderr
    assert done.stderr.endswith(f"leave the launcher out: write -- {instead}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --epochs 1",
        "python -m dynamix.observe --out observed train.py",
        "python train.py --launcher torchrun",
        "python -m package.job --launcher srun",
        "python tests/torchrun.py",
        "accelerate env",
    ],
)
def test_a_command_of_one_rank_is_no_launcher(command: str) -> None:
    check_command(command.split())


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
    assert not any("((" in text for _, text in found.values())  # an error's text, not its numbers
    assert [name for _, name in socket.if_nameindex()] == before


def test_the_doctor_names_device_hosts_which_every_machine_can_emulate() -> None:
    assert [available for name, available, _ in emulation() if name == "device hosts"] == [True]


def test_the_command_prints_the_schema() -> None:
    printed = CliRunner().invoke(app, ["emulate", "--schema"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == scenario_schema()
