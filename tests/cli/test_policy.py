"""`dynamix policy ...`: pages that a person reads, JSON that a program reads, files that are refused."""

import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.cli.policy_pages import columns_table
from dynamix.policies import policy_names
from dynamix.policies.learned.policy import PRETRAINED, LearnedPolicy
from tests.policies.test_files import HARMS

runner = CliRunner()


def call(*arguments, columns=80):
    return runner.invoke(app, list(arguments), env={"COLUMNS": str(columns)})


@pytest.mark.parametrize("name", [*policy_names(), "static:64", "guarded:dynamix", str(PRETRAINED)])
def test_every_kind_of_name_is_shown_on_less_than_a_screen_and_fits(name):
    result = call("policy", "show", name)
    assert result.exit_code == 0, result.output
    lines = result.stdout.rstrip().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert f"dynamix policy evaluate {name}" in " ".join(result.stdout.split()) or len(name) > 40


def test_a_learned_policy_says_what_it_is_and_how_it_was_made_and_explains_its_scores():
    page = " ".join(call("policy", "show").stdout.split())
    for text in ("learned policy", "dynamix policy train --policy dynamix --seed 0", "commit", "goodput rule"):
        assert text in page
    for row in ("without PPO", "with PPO", "lb_bsp", "static"):
        assert row in page
    assert "Chosen: with" in page


def test_json_keeps_everything_that_a_file_says():
    shown = json.loads(call("policy", "show", "dynamix", "--json").stdout)
    file = json.loads(PRETRAINED.with_suffix(".json").read_text())
    assert {**file, "file": str(PRETRAINED)} == shown
    assert json.loads(call("policy", "show", "goodput", "--json").stdout)["kind"] == "rule"


@pytest.mark.parametrize("name", ["dynamix", "dynamix-paper", "stigmergic"])
def test_what_a_training_takes_is_listed_and_taken(name):
    said = call("policy", "train", "--policy", name, "--settings", "--set", "windows=9").stdout.split("\n")[:-1]
    listed, meanings = zip(*(line.split("  ", 1) for line in said), strict=True)
    assert "windows=9" in listed
    assert all(meaning.strip() for meaning in meanings)
    taken = [line for line in listed if not line.startswith("actions=")]  # an object
    again = call("policy", "train", "--policy", name, "--settings", *(f"--set={line}" for line in taken))
    assert again.stdout.split("\n")[:-1] == said
    assert json.loads(call("policy", "train", "--policy", name, "--settings", "--json").stdout)["windows"] != "9"


@pytest.mark.parametrize("harm", ["cut", "not json", "no weights"])
@pytest.mark.parametrize("command", ["policy show", "policy evaluate", "demo --quick --policy"])
def test_a_policy_file_that_cannot_be_trusted_is_one_line_and_exit_code_2(command, harm, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = tmp_path / "p.safetensors"
    LearnedPolicy.load(PRETRAINED).save(file)
    damage, said = HARMS[harm]
    damage(file)
    result = call(*command.split(), str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert re.search(said, result.stderr)
    assert str(tmp_path / "p.") in result.stderr, "which of the two files is meant"
    assert list((tmp_path / "work").iterdir()) == []


SMALL = ["--families", "pai-steady", "--workers", "2", "--rows", "8", "--windows", "4"]


def test_a_policy_is_scored_on_the_calibrated_families_beside_rules_and_references():
    found = json.loads(call("policy", "evaluate", "dynamix", *SMALL, "--json").stdout)
    assert {"static", "lb_bsp", "cannikin", "goodput", "hedged", "dynamix"} == found["cells"]["pai-steady-2"].keys()
    more = json.loads(call("policy", "evaluate", "lb_bsp", *SMALL, "--no-hedged", "--against", "dbs", "--json").stdout)
    assert {"dbs", "lb_bsp"} <= more["summary"].keys()
    assert "world='nonsense'" in call("policy", "evaluate", "--families", "nonsense").stderr
    assert "workers='two'" in call("policy", "evaluate", "--workers", "two").stderr


def test_the_scores_are_a_table_that_fits_and_a_legend_explains_every_column():
    name = "guarded:dynamix"
    lines = call("policy", "evaluate", name, *SMALL, "--no-hedged").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if line.strip().startswith("cell")).split()
    assert head[-1] == name
    for column in head[1:]:
        assert any(line.startswith(f"{column} ") for line in lines), f"{column} is explained"
    assert any(line.strip().startswith("pai-steady-2") for line in lines)


def test_a_name_that_is_too_wide_for_the_terminal_goes_on_below():
    name, console = "guarded:rules_of_mine.py:FollowTheNoise", Console(width=60)
    table = columns_table("run", "samples", "samples a second", "to loss 0.25", f"over {name}")
    table.add_row(name, "123,456", "1,234.5", "123.4 s", "1.23")
    with console.capture() as shown:
        console.print(table)
    assert "…" not in shown.get()
    assert "".join(line[:13].strip() for line in shown.get().splitlines()).endswith(name)
