from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix_lab.commands.removed import REMOVED


def test_a_result_names_the_command_that_made_it_with_every_option() -> None:
    given = ["bench", "overhead", "--json", "--policies", "goodput", "--decision-only", "--workers", "4"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["command"].split()
    assert said[:3] == ["dynamix", "bench", "overhead"]
    assert {"--decision-only", "--policies", "goodput", "--workers", "4"} == set(said[3:])
    assert CliRunner().invoke(app, said[1:]).exit_code == 0


MEASUREMENTS = "calibration compression disturbance excavation faults fuzz observe overhead peers stigmergy "
MEASUREMENTS += "experiment first-run opponents recipes"


def test_every_measurement_is_a_command() -> None:
    for name in MEASUREMENTS.split():
        done = CliRunner().invoke(app, ["bench", name, "--help"])
        assert done.exit_code == 0, name
        assert "--json" in done.output, name


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((f"compression {wrong}", "") for wrong in ("--workloads netflix", "--workers two", "--rates 0")),
        ("experiment nothing.toml", "nothing.toml, TOML file"),
        ("first-run --rows nonsense", "rows='nonsense', lb_bsp"),
        ("first-run-live --processes 2", "the machine is the cluster"),
        *((f"peers --peers {name}", "") for name in ("horovod", "ddp-7", "ddp-every8", "ddp-lr0", "ddp-256 --sweep")),
        *((f"peers --peers torchft-local-every{steps}", "") for steps in (0, 32)),
        *((f"peers {wrong}", "") for wrong in ("--workload pysource", "--clock 0", "--scenario nonsense")),
        *((f"peers --policies {row}", "") for row in ("dynamix", "static,dynamix-7", "static,dynamix-512-lr0.1")),
        ("peers --policies static,dynamix-128-lr0.1-every8", ""),
        ("peers --seed 9001", ""),
        ("excavation --methods qmix", "methods='qmix', mappo"),
        ("calibration nowhere out.json", "nowhere, fits/affine_step_time.csv"),
    ],
)
def test_bad_arguments_end_with_one_clear_line_and_no_folder(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", *line.split()])
    assert done.exit_code == 2
    assert done.output.strip().startswith("error: ")
    assert len(done.output.strip().splitlines()) == 1
    assert all(part in done.output for part in said.split(", ")), done.output
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_an_experiment_is_short_for_experiment_and_its_name() -> None:
    said = [CliRunner().invoke(app, ["bench", *words, "--help"]) for words in (["regimes"], ["experiment", "regimes"])]
    assert said[0].output == said[1].output
    assert "first-run: " in said[0].output


def test_a_command_that_is_gone_says_what_to_write_now(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"]).output
    monkeypatch.setattr("dynamix_lab.installed.find_spec", lambda name: None)
    there = CliRunner().invoke(app, ["bench", "fuzz"])
    assert (there.exit_code, "pip install" in there.output) == (2, True)  # only a command that exists needs packages
    for name in REMOVED:
        for arguments in ([], ["--help"], ["--against", "HEAD~1", "--json"]):
            done = CliRunner().invoke(app, ["bench", name, *arguments])
            assert done.exit_code == 2
            assert done.output == f"error: dynamix bench {name}: removed in 0.3: write {REMOVED[name]}\n"
        assert f"│ {name} " not in shown
