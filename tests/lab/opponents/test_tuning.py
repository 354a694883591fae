"""Tuning: as many trials for every row, the same halving, and a search that finds what is better."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dynamix.errors import ConfigError
from dynamix.policies.registry import parse_name
from dynamix_lab.opponents.periods import Moment, period_of
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.opponents.tuning import ROWS, TuningSpace, grid, neighbours, tune
from tests.refused import refused

SPACE = TuningSpace({16: 0.02, 256: 0.3}, workers=4, budget=20_000)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_begins_with_nine_trials_that_differ_at_the_same_three_rates(row: str) -> None:
    trials = grid(row, SPACE)
    assert len(set(trials)) == len(trials) == 9
    assert {trial.row for trial in trials} == {row}
    by_choice = [trials[at : at + 3] for at in (0, 3, 6)]
    for choice in by_choice:
        assert len({(t.batch_size, t.lr_rule, t.local and (t.local.steps, t.local.momentum)) for t in choice}) == 1
        rates = [trial.learning_rate for trial in choice]
        assert rates[-1] == pytest.approx(4 * rates[0])
    if trials[0].policy not in (None, "profiled", "reference"):
        parse_name(str(trials[0].policy))


def test_qsr_begins_at_its_base_at_every_rate_and_grows_as_the_rate_falls() -> None:
    for trial in grid("qsr", SPACE):
        rule = period_of(trial)
        assert rule.at(Moment(0, trial.learning_rate, 1.0)).steps == trial.local.steps
        assert rule.at(Moment(0, trial.learning_rate / 2, 1.0)).steps == 4 * trial.local.steps


def test_the_best_third_goes_on_to_the_next_seed() -> None:
    asked: list[tuple[float, int]] = []

    def run(trial: Trial, seed: int) -> Any:
        asked.append((trial.learning_rate, seed))
        # On the second seed the order among those left is another.
        return abs(trial.learning_rate - 0.1) + 1 if seed == 9001 else 1 / trial.learning_rate

    trials = grid("static", SPACE)
    best, tried = tune(trials, run, float)  # type: ignore[arg-type]
    assert [seed for _, seed in asked] == [9001] * 9 + [9002] * 3
    assert best.learning_rate == max(rate for rate, seed in asked if seed == 9002)
    assert [len(t.worth) for t in tried] == [2] * 3 + [1] * 6
    assert [t.mean for t in tried[:3]] == sorted(t.mean for t in tried[:3])
    assert {t.trial for t in tried} == set(trials)


@pytest.mark.parametrize("row", ROWS)
def test_the_search_goes_on_beyond_its_grid_with_as_many_trials_for_every_row(row: str) -> None:
    asked: list[tuple[Trial, int]] = []

    def worth(trial: Trial) -> float:  # large batches and high rates are best, beyond any grid
        return 1 / (trial.batch_size * trial.learning_rate)

    def run(trial: Trial, seed: int) -> Any:
        asked.append((trial, seed))
        return trial

    trials = grid(row, SPACE)
    best, tried = tune(trials, run, worth, near=lambda trial: neighbours(trial, SPACE))  # type: ignore[arg-type]
    assert [seed for _, seed in asked] == [9001] * 15 + [9002] * 5
    assert len({trial for trial, _ in asked[:15]}) == 15
    assert {trial.row for trial, _ in asked} == {row}
    assert best == tried[0].trial
    assert best.batch_size == 4 * max(trial.batch_size for trial in trials)


def test_neighbours_of_a_way_to_meet_are_the_same_way_at_other_periods() -> None:
    for row in ("local", "post_local", "adacomm", "qsr", "diloco"):
        trial = grid(row, SPACE)[1]
        near = [one for one in neighbours(trial, SPACE) if one.local and one.local.steps != trial.local.steps]
        wanted = {2 * trial.local.steps, trial.local.steps // 2} - {0}
        assert {one.local.steps for one in near if one.local} == wanted
        for one in near:
            assert one.local
            assert (one.local.period, one.local.outer) == (trial.local.period, trial.local.outer)
            assert period_of(one).at(Moment(0, one.learning_rate, 1.0)).steps in (one.local.steps, 1)


def test_a_run_that_arrives_nowhere_is_never_chosen_and_survives_json() -> None:
    trials = grid("single", SPACE)
    worth = {trial: math.inf if at else 3.0 for at, trial in enumerate(trials)}
    runs: Any = lambda trial, seed: trial  # noqa: E731
    best, tried = tune(trials, runs, lambda run: worth[run])  # type: ignore[index]
    assert best == trials[0]
    kept = [json.loads(json.dumps(one.to_dict()))["worth"] for one in tried]
    assert kept[0] == [3.0, 3.0]
    assert kept[-1] == [None]


def test_rates_are_laid_about_the_jobs_curve_at_the_batch_whose_noise_they_meet() -> None:
    assert [SPACE.rate_at(batch) for batch in (4, 16, 64, 256, 1024)] == [0.02, 0.02, 0.077, 0.3, 0.3]
    first = {row: grid(row, SPACE)[1] for row in ("single", "static", "local")}
    batches = {row: trial.batch_size for row, trial in first.items()}
    assert batches == {"single": 64, "static": 16, "local": 16}
    rates = {row: trial.learning_rate for row, trial in first.items()}
    assert rates == {"single": SPACE.rate_at(64), "static": SPACE.rate_at(4 * 16), "local": SPACE.rate_at(2 * 16)}


def test_what_cannot_be_tuned_is_refused() -> None:
    refused(ConfigError, r"row='hope' .* single", grid, "hope", SPACE)
    refused(ConfigError, "periods", TuningSpace, {64: 0.05}, 4, 1000, periods=(4, 4))
    refused(ConfigError, "trials, seeds", tune, [], lambda trial, seed: trial, lambda run: 1.0)
