"""The comparison runs every method, keeps what is finished, and says what it found with intervals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError, StateError
from dynamix_lab.experiments.excavation.aggregate import interquartile_mean, stratified
from dynamix_lab.experiments.excavation.experiment import ExperimentConfig, main, run, table
from dynamix_lab.experiments.excavation.ground import Shape
from dynamix_lab.experiments.excavation.learner import DQNConfig
from dynamix_lab.experiments.excavation.lessons import Stage
from dynamix_lab.experiments.excavation.maddpg import MADDPGConfig
from dynamix_lab.experiments.excavation.mappo import MAPPOConfig
from dynamix_lab.experiments.excavation.world import ExcavationConfig

METHODS = ("s-madrl", "madqn", "mappo", "random")
QUICK = ExperimentConfig(
    methods=METHODS,
    agents=(1, 3),
    seeds=(0,),
    task=ExcavationConfig(Shape(2, 2, 2, 2), horizon=40),
    dqn=DQNConfig(hidden=8, batch=16, warm_up=32, capacity=200),
    mappo=MAPPOConfig(hidden=8, rollout=20),
    stages=(Stage((1,), 20, 1.0), Stage((1, 2), 20, 0.3)),
    worlds=4,
    evaluation_worlds=4,
)


def test_it_compares_all_methods_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    told: list[str] = []
    run(QUICK, tmp_path, tell=told.append)
    assert len(told) == len(METHODS)
    assert all("processor" in line for line in told)
    more = dataclasses.replace(QUICK, seeds=(0, 1))
    result = run(more, tmp_path, tell=told.append)
    assert len(told) == 2 * len(METHODS)
    again = run(more, tmp_path, tell=told.append)
    assert len(told) == 2 * len(METHODS)
    assert again == result
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["methods"].keys() == set(METHODS)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    for part in result["methods"].values():
        assert part["seeds"] == [0, 1]
        for agents in ("1", "3"):
            assert part["agents"][agents]["pellets_per_1000"]["low"] is not None
    assert result["steps_of_worlds"] == 40 * 4
    assert len(table(result).splitlines()) == 1 + 2 * len(METHODS)

    for other in ({"worlds": 5}, {"mappo": MAPPOConfig(hidden=9, rollout=20)}):
        with pytest.raises(StateError, match="another configuration"):
            run(dataclasses.replace(QUICK, **other), tmp_path)
    run(dataclasses.replace(QUICK, maddpg=MADDPGConfig(hidden=9)), tmp_path, tell=told.append)
    other = {"mappo": MAPPOConfig(hidden=9, rollout=20), "methods": ("s-madrl",)}
    run(dataclasses.replace(QUICK, **other), tmp_path, tell=told.append)
    assert len(told) == 2 * len(METHODS), "settings of a method that did not run change nothing"
    for damaged in ("{", "{}", "3"):
        (tmp_path / "runs.jsonl").write_text(damaged)
        with pytest.raises(StateError, match="damaged"):
            run(QUICK, tmp_path)
    with pytest.raises(ConfigError, match="methods"):
        dataclasses.replace(QUICK, methods=("qmix",))


def test_a_seed_gives_the_same_result_again() -> None:
    first, second = (
        run(dataclasses.replace(QUICK, methods=("s-madrl",), agents=(2,)), tell=lambda _: None) for _ in range(2)
    )
    for result in (first, second):
        del result["methods"]["s-madrl"]["seconds"]
    assert first == second


def test_outliers_do_not_move_the_interquartile_mean_and_the_interval_holds_it() -> None:
    scores = np.random.default_rng(0).normal(10, 1, size=(12, 3))
    assert interquartile_mean(np.append(scores, 1e6)) == pytest.approx(10, abs=0.5)
    estimate = stratified(scores)
    assert estimate.low < estimate.value < estimate.high
    assert estimate.high - estimate.low < 2
    assert np.isnan(stratified([1.0]).low)
    with pytest.raises(ConfigError, match="scores"):
        interquartile_mean([])


def test_the_command_prints_the_table_and_writes_the_ground_it_ran_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path), "--seeds", "2", "--methods", "random", "--ground", "single-file", "--horizon", "5"])
    with pytest.raises(ConfigError, match="scale"):
        main([str(tmp_path), "--scale", "nan"])
    printed = capsys.readouterr().out
    assert "random seed 1" in printed
    assert "pellets_per_1000" in printed
    task = json.loads((tmp_path / "result.json").read_text())["config"]["task"]
    assert task["shape"]["tunnel_width"] == 1
    assert task["horizon"] == 5
