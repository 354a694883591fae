"""The experiments as commands: they run, are named in their results, go on in their folder, refuse what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dynamix.cli.app import app


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("options", "row"),
    [
        (["transfer", "--forms", "dynamix-paper", "--pairs", "depth: VGG", "--quick"], "depth: VGG-16 to 19"),
    ],
)
def test_a_learning_experiment_writes_a_run_folder_and_goes_on_there(
    options: list[str], row: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = bench(*options, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert row in done.output
    result = json.loads((out / "result.json").read_text())
    assert result["command"].startswith("dynamix bench " + options[0])
    assert result["cluster"] == "simulator"
    trained = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert trained
    again = bench(*options, "--out", str(out), "--resume", "--json")
    assert json.loads(again.stdout)["forms"] == result["forms"]
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")} == trained
