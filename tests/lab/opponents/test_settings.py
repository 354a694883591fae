"""Trials, periods, shares and their tuning: what each promises by itself."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix.policies.registry import parse_name
from dynamix.window import Bounds, Window
from dynamix_lab.opponents.local import EndlessOrder
from dynamix_lab.opponents.periods import AdaComm, Moment, period_of
from dynamix_lab.opponents.profiled import STEPS, Profiled
from dynamix_lab.opponents.shares import FIRST_STEPS, StepShares, steps_of, whole_steps
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.opponents.tuning import ROWS, TuningSpace, grid, neighbours, tune
from tests.refused import refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 0}, "batch_size=0 .* a whole number, 1 or more"),
        ({"batch_size": True}, "batch_size=True"),
        ({"learning_rate": float("nan")}, "learning_rate=nan .* above 0"),
        ({"lr_rule": "cube"}, "lr_rule='cube' .* adascale"),
        ({"schedule": "cosine"}, "budget=None .* cosine"),
        ({"policy": "static", "local": {"period": "qsr"}}, "period='qsr' .* fixed, ratio, auto with a policy"),
        ({"policy": None, "local": {"period": "ratio"}}, "policy=None"),
        ({"colour": 1}, "field of Trial='colour' .* batch_size"),
        ({"local": 3}, "local=3 "),
        ({"learning_rate": ...}, "learning_rate"),
        ({"local": {"period": "often"}}, "period='often' .* qsr"),
        ({"local": {"period": "adacomm"}}, "budget=None .* adacomm"),
        ({"local": {"steps": 9, "most_steps": 8}}, "most_steps=8 .* 9 or more"),
        ({"local": {"speeds": [1.0, 0.0]}}, "speeds=0.0"),
    ],
)
def test_what_is_wrong_in_a_trial_is_named(change: dict[str, Any], said: str) -> None:
    plain = Trial("local", None, 32, 0.1, local=LocalSettings()).to_dict()
    given = {name: value for name, value in {**plain, **change}.items() if value is not ...}
    refused(ConfigError, said, Trial.from_dict, given)


# ---------------------------------------------------------------- periods


def test_adacomm_falls_with_the_loss_and_rises_with_a_falling_rate() -> None:
    waiting = AdaComm(16, every=100, most=64)
    assert waiting.at(Moment(0, 0.1, float("nan"))) == waiting  # no loss yet
    rule = waiting.at(Moment(10, 0.1, 4.0))
    fallen = rule.at(Moment(100, 0.1, 1.0))
    assert fallen.steps == 8  # sqrt(1/4) of 16
    assert fallen.at(Moment(150, 0.1, 0.1)).steps == 8  # looks again at 200
    assert fallen.at(Moment(200, 0.1, 1.0)).steps == 4  # the loss stands still
    assert fallen.at(Moment(200, 0.025, 1.0)).steps == 16  # the rate is a quarter
    assert AdaComm(16, every=1, most=20).at(Moment(1, 0.1, 1.0)).at(Moment(2, 0.001, 1.0)).steps == 20


# ---------------------------------------------------------------- shares


def test_whole_steps_never_wait_longer_than_proportional_ones_and_fill_the_slowest_ones_time() -> None:
    step_s = np.array([1.0, 1.25, 2.0, 5.0])
    for mean in (1, 2, 3, 4, 8, 32):
        proportional, whole = steps_of(1 / step_s, mean), whole_steps(step_s, mean)
        speeds = [float(steps.sum() / (steps * step_s).max()) for steps in (proportional, whole)]
        assert mean * 4 <= whole.sum() <= 1.5 * mean * 4
        assert whole.min() >= 1
        assert speeds[1] >= 0.97 * speeds[0]
    assert whole_steps([1.0, 1.0, 1.0, 5.0], 2).tolist() == [4, 4, 3, 1]  # 12 steps at most
    assert whole_steps([1.0, 1.0, 1.0, 5.0], 4).tolist() == [5, 5, 5, 1]


def _measured(shares: StepShares, step_s: list[float], mean: int = 8) -> list[int]:
    shares.measured(shares.plan(0, mean), np.array(step_s))
    return [int(n) for n in shares.plan(0, mean).steps]


def test_shares_start_even_and_short_then_follow_what_was_measured_whatever_one_pause() -> None:
    shares = StepShares(2, 16)
    assert shares.plan(0, 8).steps.tolist() == [FIRST_STEPS, FIRST_STEPS]
    assert _measured(shares, [0.1, 0.3]) == [12, 4]
    assert _measured(shares, [0.1, 0.3]) == [12, 4]
    assert _measured(shares, [30.0, 0.3]) == [12, 4]


def test_smaller_pieces_bring_a_slow_worker_into_a_fair_round_even_with_a_fixed_cost() -> None:
    shares = StepShares(4, 32, smaller_pieces=True)
    plan = shares.plan(0, 2)
    for _ in range(12):
        shares.measured(plan, np.array([1.0, 1.0, 1.0, 9.0]) * (0.005 + 0.001 * plan.pieces))
        plan = shares.plan(0, 2)
    took = plan.steps * np.array([1.0, 1.0, 1.0, 9.0]) * (0.005 + 0.001 * plan.pieces)
    assert plan.pieces[:3].tolist() == [32, 32, 32]
    assert 1 <= plan.pieces[3] < 32
    assert took[3] < 1.4 * took[0]


def test_the_stream_gives_every_sample_once_an_epoch_however_it_is_cut() -> None:
    order = EndlessOrder(50, seed=3)
    pieces = [order.take(start, 7) for start in range(0, 350, 7)]
    whole = torch.cat(pieces)
    for epoch in range(7):
        assert sorted(whole[50 * epoch : 50 * epoch + 50].tolist()) == list(range(50))
    assert torch.equal(EndlessOrder(50, seed=3).take(120, 200), whole[120:320])


# ---------------------------------------------------------------- meetings


# ---------------------------------------------------------------- profile


def _profile(
    policy: Profiled, bounds: Bounds, sizes: np.ndarray[Any, Any], windows: int, steps: float
) -> list[list[int]]:
    """Sizes in force, window by window, of workers with lines of their own."""
    fixed, each, seen = np.array([0.02, 0.05]), np.array([0.001, 0.002]), []
    for _ in range(windows):
        seen.append([int(n) for n in sizes])
        sizes = policy.decide(Window.of(sizes, compute=fixed + each * sizes, steps=steps), bounds)
    return seen


def test_the_profile_takes_twenty_steps_at_three_sizes_and_then_holds_what_makes_all_finish_together() -> None:
    seen = _profile(Profiled(), Bounds.of(2, 1, 256), np.array([40, 40]), 20, steps=STEPS / 4)
    assert seen[:12] == [[40, 40]] * 4 + [[20, 20]] * 4 + [[60, 60]] * 4
    # 0.02 + 0.001 a = 0.05 + 0.002 (80 - a)
    assert seen[12:] == [[63, 17]] * 8
    narrow = _profile(Profiled(), Bounds.of(2, 40, 60), np.array([40, 40]), 6, steps=STEPS)
    assert narrow[0] == narrow[1] == [40, 40]
    assert sum(narrow[-1]) == 80


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


def test_a_run_that_arrives_nowhere_is_never_chosen_and_survives_json() -> None:
    trials = grid("single", SPACE)
    worth = {trial: math.inf if at else 3.0 for at, trial in enumerate(trials)}
    runs: Any = lambda trial, seed: trial  # noqa: E731
    best, tried = tune(trials, runs, lambda run: worth[run])  # type: ignore[index]
    assert best == trials[0]
    kept = [json.loads(json.dumps(one.to_dict()))["worth"] for one in tried]
    assert kept[0] == [3.0, 3.0]
    assert kept[-1] == [None]


def test_what_cannot_be_tuned_is_refused() -> None:
    refused(ConfigError, r"row='hope' .* single", grid, "hope", SPACE)
    refused(ConfigError, "periods", TuningSpace, {64: 0.05}, 4, 1000, periods=(4, 4))
    refused(ConfigError, "trials, seeds", tune, [], lambda trial, seed: trial, lambda run: 1.0)
