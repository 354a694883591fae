"""The guard: a policy that does harm is replaced by the goodput rule within a few windows, a good one is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.policies.goodput import Goodput
from dynamix.policies.guard import Guard
from dynamix.policies.proportional import LBBSP, fill_unknown, speeds
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window
from dynamix_lab.simulator import ClusterEnv, rollout, sample_clusters, sample_family
from dynamix_lab.training.evaluation import times_to_progress
from tests.refused import refused
from tests.union import Script

WINDOWS = 60
STATES = Path(__file__).with_name("states_0_2")


class Adversary(Script):
    """No state of its own but how often it was asked."""

    def __init__(self) -> None:
        super().__init__([])

    def decide(self, window: Window, bounds: Bounds) -> Any:
        self.asked += 1
        return self.answer(window, bounds)

    def answer(self, window: Window, bounds: Bounds) -> Any:
        raise NotImplementedError


class SlowestMost(Adversary):
    """Gives the slowest worker the most."""

    def answer(self, window: Window, bounds: Bounds) -> Ints:
        return project(1.0 / fill_unknown(speeds(window)), bounds, total=window.batch_size.sum(-1))


class Smallest(Adversary):
    """Sends the global batch to its minimum."""

    def answer(self, window: Window, bounds: Bounds) -> Ints:
        return np.broadcast_to(bounds.low, window.batch_size.shape).copy()


class NotANumber(Adversary):
    def answer(self, window: Window, bounds: Bounds) -> Any:
        return np.full(window.batch_size.shape, np.nan)


class Raises(Adversary):
    def answer(self, window: Window, bounds: Bounds) -> Any:
        raise ZeroDivisionError("on purpose")


class Skewed(Adversary):
    """Good shares, times e^+-skew in turn over the workers."""

    skew = 0.3

    def answer(self, window: Window, bounds: Bounds) -> Ints:
        wish = fill_unknown(speeds(window)) * np.exp(self.skew * (-1.0) ** np.arange(window.workers))
        return project(wish, bounds, total=window.base_batch)


class Oscillates(Skewed):
    """To and fro, and well-behaved in between."""

    def answer(self, window: Window, bounds: Bounds) -> Ints:
        self.skew = (0.0, 0.5, 0.0, -0.5)[self.asked % 4]
        return super().answer(window, bounds)


HARMLESS_AFTER = {SlowestMost: 15, Smallest: 0, NotANumber: 0, Raises: 0, Skewed: 18, Oscillates: 15}
FAULTY = (NotANumber, Raises)


def guarded(make: Callable[[], Adversary]) -> Guard:
    return Guard(make())


@pytest.mark.filterwarnings("ignore:the policy:RuntimeWarning")
@pytest.mark.parametrize("make", HARMLESS_AFTER)
def test_within_a_few_windows_it_is_at_the_rule_and_all_that_is_lost_is_bounded(make: type[Adversary]) -> None:
    clusters, guard = sample_family("affine-slowdowns", 4, 8, seed=5), guarded(make)
    env = ClusterEnv(clusters, seed=5)
    first = np.full(4, -1)
    for t, _ in enumerate(islice(rollout(guard, env, HARMLESS_AFTER[make] + 2), 1, None)):
        resting = np.isin(guard.report()["guard"]["reason"], ("worse", "refused", "fault"))
        first = np.where((first < 0) & resting, t, first)
    assert (first >= 0).all(), "some cluster is not at the rule"
    assert first.max() <= HARMLESS_AFTER[make]
    rules = {"rule": lambda _: Goodput(), "guarded": lambda _: guarded(make)}
    times = times_to_progress(rules, clusters, seed=5, windows=WINDOWS, interval=5, delay=1)
    loss = times["guarded"] / times["rule"] - 1
    assert loss.mean() < (0.01 if make in FAULTY else 0.07)
    assert loss.max() < 0.12


def test_the_shipped_policy_pays_less_than_half_a_per_cent_for_being_watched() -> None:
    """On clusters as the rules assume them, and on those where little of what is measured is true."""
    costs = []
    for family in ("affine-slowdowns", "poor-probes"):
        rules = {"alone": lambda _: make_policy("dynamix"), "watched": lambda _: make_policy("guarded:dynamix")}
        clusters = sample_family(family, 16, 6, seed=6)
        times = times_to_progress(rules, clusters, seed=6, windows=60, interval=5, delay=1)
        costs.append(np.log(times["watched"] / times["alone"]).mean())
    assert np.mean(costs) < 0.005


def test_the_policy_is_tried_again_later_and_less_often_each_time() -> None:
    env = ClusterEnv(sample_clusters(1, 4, 3), seed=3)
    guard, tries = Guard(Skewed()), []
    guard.policy.skew = 0.5  # type: ignore[attr-defined]
    for t, _ in enumerate(islice(rollout(guard, env, 250), 1, None)):
        tries += [t] if guard.report()["guard"]["by"] == ["policy"] else []
    pauses = [gap for gap in np.diff(tries) if gap > 5]
    assert len(pauses) >= 3
    assert pauses == sorted(pauses)
    assert pauses[2] >= 3 * pauses[0]
    assert guard.report()["guard"]["falls"][0] >= 3


def test_a_checkpoint_of_the_policy_alone_starts_a_new_guard() -> None:
    guard = Guard(Oscillates())
    guard.load_state_dict({"asked": 3})
    assert guard.policy.asked == 3  # type: ignore[attr-defined]


def test_without_any_times_the_policy_is_left_alone() -> None:
    guard, bounds = Guard(Skewed()), Bounds.of(2, 1, 100)
    for _ in range(20):
        guard.decide(Window.of([32, 32]), bounds)
        assert guard.report()["guard"]["by"] == "policy"


def test_a_fault_is_warned_of_once_and_reported() -> None:
    guard, window, bounds = Guard(Raises()), Window.of([32, 32], compute=[1.0, 3.0]), Bounds.of(2)
    with pytest.warns(RuntimeWarning, match="on purpose"):
        guard.decide(window, bounds)
    for _ in range(20):
        answer = guard.decide(window, bounds)  # a second warning would be an error here
    assert answer[0] > answer[1], "the rule goes by speed"
    assert guard.report()["guard"]["error"] == "failed: ZeroDivisionError('on purpose')"
    assert json.dumps(guard.report())


@pytest.mark.parametrize("wrong", [np.ones(3), "text", None, np.array([-1.0, 5.0]), np.array([np.inf, 1.0])])
@pytest.mark.filterwarnings("ignore:the policy:RuntimeWarning")
def test_anything_that_is_no_allocation_is_a_fault(wrong: Any) -> None:
    policy = Raises()
    policy.answer = lambda window, bounds: wrong  # type: ignore[method-assign]
    guard = Guard(policy)
    guard.decide(Window.of([32, 32], compute=[1.0, 3.0]), Bounds.of(2))
    assert guard.report()["guard"]["reason"] == "fault"


def test_by_name_and_with_impossible_settings() -> None:
    guard = make_policy("guarded:lb_bsp")
    assert isinstance(guard, Guard)
    assert isinstance(guard.policy, LBBSP)
    refused(ConfigError, "patience", Guard, LBBSP(), patience=0.0)
    refused(ConfigError, r"verify=50 .*removed in 0\.3: write ", Guard, LBBSP(), verify=50)


def test_a_guard_of_0_2_goes_on_with_the_rest_that_it_had_begun() -> None:
    guard, state = Guard(Skewed()), json.loads((STATES / "guarded-skewed.json").read_text())
    guard.load_state_dict(state)
    told = guard.report()["guard"]
    assert (told["by"], told["reason"], told["rest_windows"], told["falls"]) == ("rule", "worse", 17, 2)
    state["guard"]["reason"], state["guard"]["rest"] = 1.0, 0.0  # within an A/B comparison
    guard.load_state_dict(state)
    assert guard.report()["guard"]["reason"] == "trusted"
