"""`dynamix policy train` makes every shipped policy: one seed, one file; what is not possible is said."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.policies.registry import make_policy
from dynamix_lab.training.dynamix_policy import choice
from dynamix_lab.training.shipped import RECIPES

TINY = {
    "dynamix": "workers=2 rows=12 windows=3 regret_rounds=1 clone_rounds=0 ppo_updates=1 ppo_workers=2 ppo_windows=2 "
    "validation_rows=8 judged_workers=2 judged_rows=8 families=1 validation_workers=2 validation_windows=3",
    "dynamix-paper": "families=pai-steady workers=2 rows=8 windows=3 updates=1 clone_rounds=0 hidden=8 "
    "validation_clusters=2 validation_workers=2 validation_windows=3",
    "stigmergic": "stages=[[2]] generations=1 tried=2 kept=1 worlds=1 rows=8 windows=3 validation_workers=2 "
    "validation_clusters=6",
}


UNTAUGHT = f"{TINY['dynamix']} regret_rounds=0"


def train(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["policy", "train", *arguments])


@pytest.mark.parametrize("name", RECIPES)
def test_one_seed_gives_one_file_that_runs_as_a_policy(name: str, tmp_path: Path) -> None:
    settings = [part for setting in TINY[name].split() for part in ("--set", setting)]
    written = []
    for file in (tmp_path / "one.safetensors", tmp_path / "two.safetensors"):
        result = train("--policy", name, "--out", str(file), "--seed", "3", *settings)
        assert result.exit_code == 0, result.output
        written.append(file.read_bytes())
    assert written[0] == written[1]
    assert make_policy(str(file)).decide is not None
    page = " ".join(CliRunner().invoke(app, ["policy", "show", str(file)]).stdout.split())
    assert f"dynamix policy train --policy {name} --seed 3 {shlex.join(settings[:4])}" in page


@pytest.mark.parametrize(("more", "said"), [("", "times as fast"), (" ppo_updates=0", "ppo_updates is 0")])
def test_a_network_without_ppo_is_said_to_be_one(more: str, said: str, tmp_path: Path) -> None:
    settings = [part for setting in f"{UNTAUGHT}{more}".split() for part in ("--set", setting)]
    result = train("--out", str(tmp_path / "p.safetensors"), *settings)
    assert "not trained by PPO, nor in a round before" in result.stderr
    assert said in result.stderr
    stages = {"chosen": "with PPO", "ppo_over_without": {"all": [1.2, 1.1, 1.3]}}
    assert choice({"training": {"clone_rounds": 0, "regret_rounds": 1}, "stages": stages}) == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "goodput"], ["policy='goodput'", "dynamix-paper"]),
        (["--policy", "stigmergic", "--checkpoint", "x.pt"], ["checkpoint='x.pt'", "dynamix", "leave it out"]),
        (["--set", "worker=2"], ["set='worker=2'", "workers"]),
        (["--set", "workers=2;4"], ["set='workers=2;4'", "whole numbers, comma-separated"]),
        (["--set", "windows=abc"], ["a whole number"]),
        *((["--set", f"{name}=-1"], ["0 or more"]) for name in ("ppo_updates", "regret_rounds", "clone_rounds")),
        (["--set", "windows=0"], ["1 or more"]),
        (["--set", "families=99"], ["families=99", "1 to 21"]),
        (["--policy", "dynamix-paper", "--set", "learner=dqn"], ["learner=dqn", "simplified"]),
        (["--policy", "stigmergic", "--set", "stages=[[2]"], ["stages=[[2]"]),
    ],
)
def test_what_is_not_possible_is_said_before_any_work(arguments: list[str], said: list[str], tmp_path: Path) -> None:
    result = train("--out", str(tmp_path / "p.safetensors"), *arguments)
    assert result.exit_code == 2
    assert all(part in result.output for part in said), result.output
    assert not list(tmp_path.iterdir())
