"""Traces with meaning, agents that rest by a threshold of their own, motion by hand, and agents that are lost."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix_lab.excavation.gate_search import RANGES, GateSearch, gate_of, lasting, learn_gate, scores
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


def _alone(row: int, column: int, *, agents: int = 1) -> Excavation:
    env = Excavation(TASK, agents=agents, seed=0)
    b = env.burrow
    env.place[0, 0] = int(np.flatnonzero((b.row == row) & (b.column == column))[0])
    return env


def test_a_trace_says_who_left_it_and_which_way() -> None:
    env = _alone(2, 4)
    width, around = 5, 25

    def smelt(step: int, columns: int) -> list[float]:
        seen, _, _ = env.step(np.array([[step]]))
        parts = seen[0, 0, 30 : 30 + 3 * around].reshape(3, width, width)
        return [float(part[2, 2 + columns]) for part in parts]

    assert smelt(RIGHT, 0) == [0.0, 1.0, 0.0]  # laden, going in, going out
    assert smelt(RIGHT, -1) == pytest.approx([0.0, 0.3, 0.0])  # fades within a few steps
    assert smelt(LEFT, 0) == pytest.approx([0.0, 0.3**2, 1.0])
    env.carrying[:] = True
    assert smelt(LEFT, 0)[0] == 1.0
    assert env.heading[0, 0] == -1


def test_everybody_in_the_nest_smells_how_often_the_tunnel_was_entered() -> None:
    env = _alone(2, 1, agents=2)
    seen, _, _ = env.step(np.array([[RIGHT, 0]]))
    assert env.entries_now()[0, 0] == TASK.entries.beta
    assert seen[0, 1, -2] > 0  # at home
    assert seen[0, 0, -2] == 0  # in the tunnel


def test_resters_walk_off_and_stay_where_they_are_in_nobodys_way() -> None:
    env = Excavation(TASK, agents=8, worlds=4, seed=0)
    everybody = np.ones(env.place.shape, dtype=bool)
    for _ in range(40):
        env.step(np.full(env.place.shape, RIGHT), resting=everybody)
    assert env.burrow.nest[env.place].all()
    assert env.burrow.off_path[env.place].min() >= 1
    assert env.delivered.sum() == 0


def test_a_threshold_rises_with_deliveries_and_falls_with_ways_back() -> None:
    env = Excavation(TASK, agents=3, seed=0)
    c = ThresholdConfig(lowest=4, highest=4, delivered=0.5, turned_back=-1.0, rested=-0.1, ceiling=4.5)
    gate = Thresholds(env, c)
    env.gave[:], env.turned_back[:] = [[True, False, False]], [[False, True, False]]
    gate.resting[:] = [[False, False, True]]
    gate.after()
    assert gate.theta.tolist() == [[4.5, 3.0, 3.9]]
    gate.after()
    assert gate.theta.tolist() == [[4.5, 2.0, pytest.approx(3.8)]]


def test_no_threshold_falls_below_its_floor_so_that_an_empty_tunnel_calls_everybody() -> None:
    env = Excavation(TASK, agents=3, seed=0)
    gate = Thresholds(env, ThresholdConfig(lowest=4, highest=4, turned_back=-3.0, floor=2.5, retry=1.0, steepness=40))
    env.turned_back[:] = True
    gate.after()
    assert gate.theta.tolist() == [[2.5] * 3]
    gate.resting[:], env.turned_back[:] = True, False
    env.entries.deposit(np.zeros((1, 1), dtype=np.int64), 5)  # 2 a 20 steps
    assert not gate.rest().any()


def test_who_rests_may_think_again_by_what_it_smelt_for_some_time() -> None:
    env = Excavation(TASK, agents=2, seed=0)
    gate = Thresholds(env, ThresholdConfig(lowest=3, highest=3, retry=1.0, steepness=40, memory=0.1))
    env.entries.deposit(np.zeros((1, 1), dtype=np.int64), 10)
    env.gave[:] = True
    assert gate.rest().all()
    env.gave[:] = False
    env.entries.clear()  # empty from now on
    stayed = 0
    while gate.rest().all():
        stayed += 1
    assert stayed == 2  # 4, 3.6, 3.24, and 2.9


def test_equal_agents_divide_the_work_unequally_and_for_good_and_deliver_more() -> None:
    """With motion by hand. The same worlds without a gate: more collisions, equal shares, fewer pellets."""
    together = evaluate(HandMotion(TASK), TASK, agents=8, worlds=4, seed=1).summary()
    gate = functools.partial(Thresholds, seed=1)
    divided, called = (
        evaluate(HandMotion(TASK), TASK, agents=8, worlds=4, seed=1, gate=one).summary() for one in (gate, Counting)
    )
    assert divided["pellets_per_1000"] > together["pellets_per_1000"] > 100
    assert called["pellets_per_1000"] > together["pellets_per_1000"], "a planner calls five together"
    assert divided["gini"] > 0.2 > together["gini"]
    assert divided["halves"] > 0.6
    assert divided["collisions_per_1000"] < 0.6 * together["collisions_per_1000"]


def test_the_lost_block_nobody_and_come_back_into_the_nest() -> None:
    env = Excavation(TASK, agents=4, worlds=2, seed=0)
    gone = np.array([[True, True, False, False]] * 2)
    env.leave(gone)
    act, seen = HandMotion(TASK), env.observe()
    for _ in range(200):
        seen, _, _ = env.step(act(seen))
    assert (env.delivered[gone] == 0).all()
    assert (env.delivered[~gone] > 0).all()
    env.come_back(gone)
    assert env.burrow.nest[env.place[gone]].all()
    assert all(len(set(places)) == 4 for places in env.place.tolist())
    for _ in range(200):
        seen, _, _ = env.step(act(env.observe()))
    assert (env.delivered[gone] > 0).all()


def test_the_loss_of_the_busiest_is_measured_and_their_return() -> None:
    task = ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=200)
    found = lost_and_back(HandMotion(task), task, Thresholds, agents=6, worlds=2, seed=0)
    assert found["without"] is not None
    assert found["again"] is not None
    assert 0 < found["without"] < 1.5
    assert 0 < found["again"] < 1.5
    assert found["pellets_per_1000"] is not None
    assert found["pellets_per_1000"] > 50


def test_a_learned_gate_lies_within_its_ranges() -> None:
    task = ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=30)
    config = GateSearch(rounds=2, draws=3, kept=2, agents=4, worlds=1)
    gate = learn_gate(HandMotion(task), task, config, seed=1)
    assert gate == learn_gate(HandMotion(task), task, config, seed=1)
    for name, (least, most, _) in RANGES.items():
        assert least <= getattr(gate, name) <= most
    assert gate_of(np.ones(len(RANGES))).highest == 12.0
    refused(ConfigError, "kept", GateSearch, kept=40)


def test_a_gate_is_scored_by_pellets_in_all_its_situations_and_by_lasting_division() -> None:
    task = ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=200)
    gates = [ThresholdConfig(), ThresholdConfig(lowest=0, highest=0, delivered=0.0, retry=0.0, steepness=40)]
    config = GateSearch(agents=6, worlds=2, division=0.0)
    usual, shut = scores(HandMotion(task), task, gates, config, seed=0)
    assert usual > 4 * 40
    assert shut < usual / 2  # nobody goes in again once the tunnel was entered
    divided = scores(HandMotion(task), task, gates, dataclasses.replace(config, division=1e6), seed=0)
    env = Excavation(task, agents=4, worlds=2, seed=0)
    env.early, env.delivered = np.array([[0, 0, 4, 4], [4, 4, 0, 0]]), np.array([[0, 0, 8, 8], [4, 4, 4, 4]])
    assert lasting(env).tolist() == [0.5, 0.0]
    assert (divided >= [usual, shut]).all()


def test_what_resting_agents_were_told_to_do_is_not_learned_from() -> None:
    lessons = Lessons(TASK, stages=(Stage((4,), 300, 0.5),), worlds=4, seed=0, resters=0.5)
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
