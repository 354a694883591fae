"""Results are kept with their command and machine, and the tables of the docs are generated from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix_lab.results.generated import NONE_YET, changes, generated
from dynamix_lab.results.record import load, record
from tests.refused import refused

ROOT = Path(__file__).parents[3]
MACHINE = {"cpu": "Example 1000", "cores": 2, "system": "Linux 6"}
HOST = {"cpu": "Example 1000", "cores": 2, "memory_bytes": 8, "kernel": "Linux 6", "load_average": [0.1, 0.2, 0.3]}


def _result(**other: Any) -> dict[str, Any]:
    about = {"schema": 1, "command": "scripts/mutants --seed 2", "commit": "abc123", "cluster": "emulator"}
    found = {"package": "data", "mutants": 40, "killed": 36, "limit_s": 20.0}
    rest = {"seeds": [0, 1], "target": 0.9, "mechanisms": {}, "scenario_sha256": "x", "machine": MACHINE}
    return {**about, **rest, **found, "policies": {}, "ratios": {}, **other}


def _run(folder: Path, result: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "run.json").write_text(json.dumps({"started": "2026-11-23T10:00:00+00:00", "host": HOST}))
    return folder


def test_a_result_is_kept_with_its_command_and_its_machine(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", _result())
    (folder / "table.md").write_text("| row |\n")
    made = record(folder, "demo", results=tmp_path / "results")
    assert (made / "table.md").read_text() == "| row |\n"
    assert made == tmp_path / "results" / "demo-2026-11-23"
    assert json.loads((made / "result.json").read_text()) == _result()
    assert (made / "command").read_text() == "scripts/mutants --seed 2\n"
    machine = json.loads((made / "machine.json").read_text())
    assert machine == {**HOST, "commit": "abc123", "dirty": False}
    refused(ConfigError, "demo-2026-11-23", record, tmp_path / "run", "demo", results=tmp_path / "results")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"command": "bench tta"}, "command"),
        ({"commit": None}, "pip install -e"),
        ({"commit": "abc123-dirty"}, "--changed"),
        ({"interrupted": True}, "--resume"),
        ({"schema": 99}, "schema"),
        ({"settings": {"policy": "/root/mine.safetensors"}}, r"result\.settings\.policy"),
    ],
)
def test_what_nobody_could_make_again_is_not_kept(tmp_path: Path, other: dict[str, Any], what: str) -> None:
    refused(ConfigError, what, record, _run(tmp_path / "run", _result(**other)), "demo", results=tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_changed_source_tree_is_said_and_what_is_no_result_is_refused(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", _result(commit="abc123-dirty"))
    made = record(folder, "demo", results=tmp_path / "results", changed=True)
    assert json.loads((made / "machine.json").read_text())["dirty"] is True
    unknown = _run(tmp_path / "copy", _result(commit=None))
    refused(ConfigError, "only an install with -e", record, unknown, "demo", results=tmp_path, changed=True)
    less = {name: value for name, value in _result().items() if name != "ratios"}
    refused(ConfigError, "without ratios", record, _run(tmp_path / "less", less), "demo", results=tmp_path)
    refused(ConfigError, r"result\.json", record, tmp_path, "demo", results=tmp_path / "results")
    refused(ConfigError, "lower case", record, tmp_path / "run", "../demo", results=tmp_path / "results")


def test_a_page_shows_the_newest_result_of_a_name(tmp_path: Path) -> None:
    for date, seeds in (("2026-11-21", [7]), ("2026-11-23", [8])):
        (tmp_path / "results" / f"demo-{date}").mkdir(parents=True)
        (tmp_path / "results" / f"demo-{date}" / "result.json").write_text(json.dumps(_result(seeds=seeds)))
    (tmp_path / "results" / "demo-live-2026-12-24").mkdir()
    found = load("results/demo-*", tmp_path)
    assert found["seeds"] == [8]
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "# A\n<!-- table: results/demo-* -->\nold\n<!-- end -->\n<!-- table: results/other-* -->\n<!-- end -->\n"
    )
    made = generated(page, tmp_path)
    assert "| data | 40 | 36 | 90 % | 20 |" in made
    assert "../results/demo-2026-11-23/table.md" in made
    assert NONE_YET in made
    page.write_text(made)
    assert generated(page, tmp_path) == made
    assert "\nold\n" not in made
    page.write_text("<!-- table: results/demo-* -->\n")
    refused(ConfigError, "without its end", generated, page, tmp_path)
    page.write_text("<!-- table: results/demo-2026-01-01 -->\n<!-- end -->\n")
    refused(ConfigError, "demo-2026-01-01", generated, page, tmp_path)


def test_every_result_gets_a_page_and_one_whose_suite_is_gone_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    for name, command in (("mutants", "scripts/mutants"), ("old", "dynamix bench gone")):
        folder = tmp_path / "results" / f"{name}-2026-11-23"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(_result(command=command)))
        (folder / "table.md").write_text("| as it was |\n")
    ((path, text),) = changes(tmp_path)
    assert path.parent.name == "mutants-2026-11-23"
    assert "commit abc123, seeds 0, 1; emulator, 2 cores (Example 1000)." in text
    assert "| data | 40 | 36 |" in text


def test_check_says_which_page_differs_and_changes_nothing(tmp_path: Path) -> None:
    record(_run(tmp_path / "run", _result()), "demo", results=tmp_path / "results")
    page = tmp_path / "README.md"
    page.write_text("<!-- table: results/demo-2026-11-23 -->\n<!-- end -->\n")
    before = page.read_text()
    arguments = ["bench", "tables", "--root", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--check"])
    assert done.exit_code == 1
    assert "README.md" in done.output
    assert page.read_text() == before
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 0


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="the pages are those of the repository")
def test_the_tables_of_this_repository_are_those_of_its_results() -> None:
    done = CliRunner().invoke(app, ["bench", "tables", "--check", "--root", str(ROOT)])
    assert done.exit_code == 0, done.output
