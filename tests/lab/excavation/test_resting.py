"""Traces with meaning that fade, agents that rest by a threshold, motion by hand, and agents that are lost."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from dynamix.errors import ConfigError, StateError
from dynamix_lab.excavation.fading import Decay, FadingField
from dynamix_lab.excavation.gate_search import RANGES, GateSearch, gate_of, learn_gate
from dynamix_lab.excavation.ground import GROUNDS
from dynamix_lab.excavation.hand import HandMotion
from dynamix_lab.excavation.learner import evaluate
from dynamix_lab.excavation.lessons import Lessons, Stage
from dynamix_lab.excavation.resting import AtRandom, Counting, Forced, ThresholdConfig, Thresholds
from dynamix_lab.excavation.trial import lost_and_back
from dynamix_lab.excavation.world import Excavation, ExcavationConfig
from tests.refused import refused

TASK = ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=600)
RIGHT, LEFT = 4, 3


def test_no_threshold_falls_below_its_floor_so_that_an_empty_tunnel_calls_everybody() -> None:
    env = Excavation(TASK, agents=3, seed=0)
    gate = Thresholds(env, ThresholdConfig(lowest=4, highest=4, turned_back=-3.0, floor=2.5, retry=1.0, steepness=40))
    env.turned_back[:] = True
    gate.after()
    assert gate.theta.tolist() == [[2.5] * 3]
    gate.resting[:], env.turned_back[:] = True, False
    env.entries.deposit(np.zeros((1, 1), dtype=np.int64), 5)  # 2 a 20 steps
    assert not gate.rest().any()


def test_equal_agents_divide_the_work_unequally_and_for_good_and_deliver_more() -> None:
    """With motion by hand. The same worlds without a gate: more collisions, equal shares, fewer pellets.

    To the last digit: what anybody smells, how thresholds move and where the resting walk shows in these numbers.
    """
    gates = (None, functools.partial(Thresholds, seed=1), Counting)
    together, divided, called = (
        evaluate(HandMotion(TASK), TASK, agents=8, worlds=4, seed=1, gate=gate).summary() for gate in gates
    )
    assert divided["pellets_per_1000"] > together["pellets_per_1000"] > 100
    assert divided["gini"] > 0.2 > together["gini"]
    assert divided["collisions_per_1000"] < 0.6 * together["collisions_per_1000"]
    every = (together, divided, called)
    figures = {name: [round(of[name], 6) for of in every] for name in ("pellets_per_1000", "reward", "gini")}
    assert figures["pellets_per_1000"] == [155.0, 181.666667, 184.583333]
    assert figures["reward"] == [447.54375, 525.615625, 538.51875]
    assert figures["gini"] == [0.109537, 0.302845, 0.351363]


def test_the_loss_of_the_busiest_is_made_good_by_the_others_and_they_come_back() -> None:
    task = dataclasses.replace(TASK, horizon=200)
    found = lost_and_back(HandMotion(task), task, Thresholds, agents=6, worlds=2, seed=0)
    assert found == pytest.approx({"pellets_per_1000": 182.5, "without": 0.438356, "again": 0.931507}, rel=1e-5)


def test_a_learned_gate_lies_within_its_ranges() -> None:
    task = ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=30)
    config = GateSearch(rounds=1, draws=3, kept=2, agents=4, worlds=1)
    gate = learn_gate(HandMotion(task), task, config, seed=1)
    assert gate == learn_gate(HandMotion(task), task, config, seed=1)
    for name, (least, most, _) in RANGES.items():
        assert least <= getattr(gate, name) <= most
    assert gate_of(np.ones(len(RANGES))).highest == 12.0
    refused(ConfigError, "kept", GateSearch, kept=40)


def test_what_resting_agents_were_told_to_do_is_not_learned_from() -> None:
    lessons = Lessons(TASK, stages=(Stage((4,), 300, 0.5),), worlds=4, seed=0, resters=(0.0, 0.5))
    idle = 0
    for _ in range(60):
        lessons.step(np.zeros(lessons.present.shape, dtype=int))
        gate = lessons.parts[0][2]
        assert (lessons.acted == ~(gate.resting & lessons.parts[0][1].at_home)).mean() > 0.9
        idle += int((~lessons.acted).sum())
    assert idle > 0


def test_gates_refuse_what_cannot_be() -> None:
    env = Excavation(TASK, agents=3, seed=0)
    refused(ConfigError, "count", Forced, env, 4)
    refused(ConfigError, "most", Counting, env, 0)
    refused(ConfigError, "lowest", ThresholdConfig, lowest=5, highest=4)
    refused(ConfigError, "retry", ThresholdConfig, retry=2)
    refused(ConfigError, "one a world", Thresholds, env, [ThresholdConfig()] * 3)
    for task in (ExcavationConfig(GROUNDS["single-file"]), dataclasses.replace(TASK, shape=GROUNDS["two-lane"])):
        refused(ConfigError, "task", HandMotion, task)
    refused(ConfigError, "sight, smell", HandMotion, dataclasses.replace(TASK, sight=2))
    assert AtRandom(env, most=0.0).rest().sum() == 0


@pytest.mark.parametrize("decay", [Decay(), Decay(0.0, 0.4, 0.0)])
def test_it_is_the_rule_of_the_paper_step_by_step(decay: Decay) -> None:
    rng, cells = np.random.default_rng(0), 7
    fading = FadingField(np.ones(cells, dtype=bool), decay, worlds=3)
    rho = np.full((3, cells), decay.start)
    for _ in range(1, 30):
        visited, amount = rng.integers(cells, size=(3, 2)), rng.random((3, 2))
        fading.fade()
        fading.deposit(visited, amount)
        rho = (1 - decay.alpha) * rho
        for world, cell in np.ndindex(visited.shape):
            rho[world, visited[world, cell]] += decay.beta * amount[world, cell]
    np.testing.assert_allclose(fading.value, rho, rtol=1e-12)
    asked = rng.integers(cells, size=(3, 4, 5))
    np.testing.assert_array_equal(fading.smelt(asked)[1], fading.value[1][asked[1]])


def test_traces_that_come_late_are_those_of_some_steps_ago_and_a_state_has_them() -> None:
    def moved(env: Excavation, steps: int) -> np.ndarray:
        rng = np.random.default_rng(3)
        return np.stack([env.step(rng.integers(5, size=(2, 4)))[0] for _ in range(steps)])

    def smelt(env: Excavation) -> np.ndarray:
        return env.observe()[..., env.config.traces][..., :75]

    now, late = (Excavation(dataclasses.replace(TASK, late=n), agents=4, worlds=2, seed=1) for n in (0, 2))
    seen = []
    for step in range(9):
        for env in (now, late):
            env.step(np.full((2, 4), RIGHT if step < 3 else 0))  # later all stay where they are
        seen.append(smelt(now))
        if step >= 5:
            np.testing.assert_allclose(smelt(late), seen[step - 2], rtol=1e-6)
    assert (seen[-1] != seen[-3]).any()
    other = Excavation(dataclasses.replace(TASK, late=2), agents=4, worlds=2, seed=9)
    other.load_state_dict(late.state_dict())
    np.testing.assert_array_equal(moved(other, 4), moved(late, 4))


def test_noise_is_on_traces_alone_and_repeats_from_its_seed() -> None:
    clean, *noisy = (Excavation(dataclasses.replace(TASK, noise=n), agents=3, worlds=2, seed=1) for n in (0, 0.5, 0.5))
    seen = [env.observe() for env in (clean, *noisy)]
    own = TASK.traces.start
    np.testing.assert_array_equal(seen[0][..., :own], seen[1][..., :own])
    np.testing.assert_array_equal(seen[0][..., -2:], seen[1][..., -2:])
    assert 0.2 < seen[1][..., own:-2].std() < 0.6
    np.testing.assert_array_equal(seen[1], seen[2])


def test_impossible_traces_are_refused() -> None:
    refused(ConfigError, "alpha", Decay, alpha=1.5)
    refused(ConfigError, "beta", Decay, beta=-1.0)
    refused(ConfigError, "late", FadingField, np.ones(2, dtype=bool), Decay(), worlds=1, late=-1)
    with pytest.raises(StateError, match="cells"):
        FadingField(np.ones(2, dtype=bool), Decay(), worlds=1).load_state_dict({"value": np.zeros((1, 3)), "past": []})
