"""The comparison runs every method, keeps what is finished, and says what it found with intervals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError, StateError
from dynamix_lab.excavation.aggregate import interquartile_mean, stratified
from dynamix_lab.excavation.config import ExperimentConfig, task_of
from dynamix_lab.excavation.experiment import run
from dynamix_lab.excavation.gate_search import GateSearch
from dynamix_lab.excavation.ground import Shape
from dynamix_lab.excavation.learner import DQNConfig
from dynamix_lab.excavation.lessons import Stage
from dynamix_lab.excavation.mappo import MAPPOConfig
from dynamix_lab.excavation.pages import sections
from dynamix_lab.excavation.summary import table
from dynamix_lab.excavation.world import ExcavationConfig
from tests.refused import refused

METHODS = ("s-madrl-team", "s-madrl", "madqn", "mappo", "random")
LEARNING = {"dqn": DQNConfig(hidden=8, batch=16, warm_up=32, capacity=200), "mappo": MAPPOConfig(hidden=8, rollout=20)}
LEARNING |= {"gate": GateSearch(rounds=1, draws=2, kept=2, worlds=2)}
TASK = ExcavationConfig(Shape(2, 2, 2, 2), horizon=40)
STAGES = (Stage((1,), 20, 1.0), Stage((1, 2), 20, 0.3))
QUICK = ExperimentConfig(METHODS, agents=(1, 3), seeds=(0,), task=TASK, stages=STAGES, **LEARNING)
QUICK = dataclasses.replace(QUICK, worlds=4, evaluation_worlds=4, large=(6,))


def test_it_compares_all_methods_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    told: list[str] = []

    def tell(what: str, done: float) -> None:
        told.append(what)

    run(QUICK, tmp_path, tell=tell)
    assert len(told) == len(METHODS)
    assert all("processor" in line for line in told)
    more = dataclasses.replace(QUICK, seeds=(0, 1))
    result = run(more, tmp_path, tell=tell)
    assert len(told) == 2 * len(METHODS)
    again = run(more, tmp_path, tell=tell)
    assert len(told) == 2 * len(METHODS)
    assert again == result
    assert result["methods"].keys() == {*METHODS, "s-madrl-open", "s-madrl-team-open"}
    for part in result["methods"].values():
        assert part["seeds"] == [0, 1]
        for agents in ("1", "3"):
            assert part["agents"][agents]["pellets_per_1000"]["low"] is not None
        assert part["large"]["6"]["pellets_per_1000"]["low"] is not None
    assert result["steps_of_worlds"] == 40 * 4
    assert len(table(result).splitlines()) == 1 + 2 * (len(METHODS) + 2)

    for other in ({"worlds": 5}, {"mappo": MAPPOConfig(hidden=9, rollout=20)}):
        refused(StateError, "another configuration", run, dataclasses.replace(QUICK, **other), tmp_path)
    other = {"mappo": MAPPOConfig(hidden=9, rollout=20), "methods": ("s-madrl",)}
    run(dataclasses.replace(QUICK, **other), tmp_path, tell=tell)
    assert len(told) == 2 * len(METHODS), "settings of a method that did not run change nothing"
    for damaged in ("{", "{}", "3"):
        (tmp_path / "runs.jsonl").write_text(damaged)
        refused(StateError, "damaged", run, QUICK, tmp_path)
    refused(ConfigError, "methods", dataclasses.replace, QUICK, methods=("qmix",))


def test_methods_may_have_had_unlike_numbers_of_trainings_when_time_is_up(tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, methods=("random", "madqn"))
    run(config, tmp_path)
    more = dataclasses.replace(config, seeds=(0, 1, 2))
    run(dataclasses.replace(more, methods=("random",)), tmp_path)
    summed = run(more, tmp_path, minutes=0)
    assert {name: part["seeds"] for name, part in summed["methods"].items()} == {"random": [0, 1, 2], "madqn": [0]}
    rows = sections(summed)[0].table
    assert [row[:2] for row in rows.rows] == [["random", "3"], ["madqn", "1"]]
    refused(ConfigError, "minutes", run, more, tmp_path, minutes=-1)


def test_a_run_that_fails_leaves_those_beside_it_to_be_kept(tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, methods=("hand", "random"))  # motion by hand is not for this ground
    refused(ConfigError, "single-file", run, config, tmp_path, processes=2)
    assert [json.loads(line)["method"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()] == ["random"]


def test_on_drawn_grounds_all_are_measured_on_those_that_nobody_learned_on() -> None:
    drawn = ExperimentConfig.of(methods=("s-madrl-team", "s-madrl", "hand"), seeds=1, ground="drawn", horizon=20)
    stages = (Stage((1,), 20, 1.0), Stage((1, 2), 20, 0.3))
    result = run(dataclasses.replace(drawn, stages=stages, worlds=2, evaluation_worlds=1, **LEARNING))
    assert list(result["methods"]) == ["s-madrl-team", "s-madrl", "hand", "hand-open"]
    table = sections(result)[0].table
    assert (len(table.head), len(table.rows)) == (5, 10)
    assert table.rows[0][0].startswith("10 agents, tunnel 4, chamber 4x3")


def test_a_method_may_have_its_traces_changed() -> None:
    assert task_of(QUICK.task, "hand:noise").noise == 0.5
    for wrong in ("s-madrl:loud", "madqn:late"):
        refused(ConfigError, "methods", dataclasses.replace, QUICK, methods=(wrong,))


def test_a_seed_gives_the_same_result_again() -> None:
    names = ("s-madrl:late", "mappo")
    first, second = (run(dataclasses.replace(QUICK, methods=names, agents=(2,), large=())) for _ in range(2))
    assert {*names} < first["methods"].keys()
    for result in (first, second):
        for part in result["methods"].values():
            del part["seconds"]
    assert first == second


def test_outliers_do_not_move_the_interquartile_mean_and_the_interval_holds_it() -> None:
    scores = np.random.default_rng(0).normal(10, 1, size=(12, 3))
    assert interquartile_mean(np.append(scores, 1e6)) == pytest.approx(10, abs=0.5)
    estimate = stratified(scores)
    assert estimate.low < estimate.value < estimate.high
    assert estimate.high - estimate.low < 2
    assert np.isnan(stratified([1.0]).low)
    refused(ConfigError, "scores", interquartile_mean, [])


def test_the_command_prints_the_table_and_writes_the_ground_it_ran_on(tmp_path: Path) -> None:
    def bench(*options: str) -> Result:
        return CliRunner().invoke(app, ["bench", "excavation", "--methods", "random", *options])

    out = tmp_path / "run"
    done = bench("--out", str(out), "--seeds", "2", "--ground", "single-file", "--horizon", "5")
    assert done.exit_code == 0, done.output
    saved = json.loads((out / "result.json").read_text())
    assert saved["command"] == ("dynamix bench excavation --methods random --seeds 2 --ground single-file --horizon 5")
    assert saved["config"]["task"]["shape"]["tunnel_width"] == 1
    assert saved["config"]["task"]["horizon"] == 5
    assert saved["methods"]["random"]["seeds"] == [0, 1]
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    for wrong, named in (
        (["--scale", "nan"], "scale"),
        (["--ground", "moon"], "single-file"),
        (["--slow", "2"], "speeds"),
    ):
        refused = bench("--out", str(tmp_path / "other"), *wrong)
        assert (refused.exit_code, named in refused.output) == (2, True), refused.output
