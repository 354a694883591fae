"""The excavation task: who may move, what is paid, what is seen; PettingZoo accepts it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import ConfigError
from dynamix_lab.excavation.ground import GROUNDS, Burrow, Shape
from dynamix_lab.excavation.world import Excavation, ExcavationConfig
from tests.refused import refused

STAY, UP, DOWN, LEFT, RIGHT = range(5)
LANE = ExcavationConfig(Shape(nest_rows=1, nest_columns=2, tunnel_length=3, tunnel_width=1))


def lane(*columns: int, config: ExcavationConfig = LANE) -> Excavation:
    """A single row of five cells, agents on these columns (0 and 1 are the nest, 4 is the face)."""
    env = Excavation(dataclasses.replace(config, shape=Shape(1, max(2, len(columns)), 3, 1)), agents=len(columns))
    env.place = np.array([[env.burrow.margin * env.burrow.width + env.burrow.margin + c for c in columns]])
    return env


def columns(env: Excavation) -> list[int]:
    return (env.burrow.column[env.place[0]]).tolist()


def test_a_pellet_is_fetched_and_brought_home_and_every_event_is_paid_as_named() -> None:
    env = lane(1)
    rewards = [float(env.step([[a]])[1][0, 0]) for a in [RIGHT] * 3 + [LEFT] * 3]
    assert rewards == pytest.approx([0.5, 0.5, 0.5 + 10, 0.5, 0.5, 0.5 + 20])
    assert env.delivered.tolist() == [[1]]
    _, reward, _ = env.step([[UP]])
    assert reward.tolist() == [[pytest.approx(-0.4)]]
    assert env.bumps.tolist() == [[1]]


def test_a_file_moves_on_but_nobody_enters_a_cell_or_changes_places() -> None:
    env = lane(1, 2, 3)
    env.step([[RIGHT, RIGHT, RIGHT]])
    assert columns(env) == [2, 3, 4]
    env.step([[RIGHT, RIGHT, STAY]])  # the first one blocks all behind it
    assert columns(env) == [2, 3, 4]
    assert env.collisions.tolist() == [[1, 1, 0]]
    env.step([[STAY, RIGHT, LEFT]])
    assert columns(env) == [2, 3, 4]


def test_one_of_two_gets_a_cell_and_each_now_and_then() -> None:
    winners = set()
    for seed in range(20):
        env = lane(1, 3)
        env.rng = np.random.default_rng(seed)
        env.step([[RIGHT, LEFT]])
        assert sorted(columns(env)) in ([1, 2], [2, 3])
        assert env.collisions.sum() == 1
        winners.add(tuple(columns(env)))
    assert len(winners) == 2


def test_on_every_ground_a_step_that_is_paid_as_closer_leads_to_the_goal() -> None:
    for shape in (*GROUNDS.values(), Shape(5, 2, 3, 1, 3, 2), Shape(6, 2, 3, 1, 3, 2, tunnels=3)):
        burrow = Burrow(shape, margin=2)
        free = np.flatnonzero(~burrow.rock)
        for steps, goal in ((burrow.to_face, burrow.face), (burrow.to_nest, burrow.nest)):
            assert (steps[free] == 0).tolist() == goal[free].tolist()
            around = free[:, None] + np.array([-burrow.width, burrow.width, -1, 1])
            nearest = np.where(burrow.rock[around], 10**6, steps[around]).min(-1)
            away = steps[free] > 0
            assert (nearest[away] == steps[free][away] - 1).all()
    assert {Burrow(shape).farthest for shape in GROUNDS.values()} == {11, 12}


@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 10**6), st.sampled_from([None, 3]))
@settings(max_examples=25, deadline=None)
def test_whatever_they_do_nobody_is_in_rock_or_in_somebody_else(
    agents: int, width: int, seed: int, pellets: int | None
) -> None:
    config = ExcavationConfig(Shape(4, 2, 3, width), pellets=pellets, horizon=40)
    env, rng = Excavation(config, agents=agents, worlds=5, seed=seed), np.random.default_rng(seed)
    bounds = (-1.0, 2.0)
    while not env.over:
        seen, _, _ = env.step(rng.integers(5, size=(5, agents)))
        assert not env.burrow.rock[env.place].any()
        assert all(len(set(world)) == agents for world in env.place.tolist())
        assert seen.min() >= bounds[0]
        assert seen.max() <= bounds[1]
        if pellets is not None:
            assert (env.delivered.sum(-1) + env.carrying.sum(-1) + env.left == pellets).all()


def test_agents_see_what_is_near_and_smell_where_somebody_was() -> None:
    env = lane(1, 2)
    seen = env.observe()[0]
    near = env.config.traces.start - 2 * 8, env.config.traces.start - 8  # empty-handed, then laden
    assert seen[0, near[0] : near[1]].sum() == 1  # each sees the other
    assert seen[1, near[0] : near[1]].sum() == 1
    env.step([[STAY, RIGHT]])
    seen = env.observe()[0]
    assert seen[0, near[0] : near[1]].sum() == 0  # out of sight
    traces = seen[0, env.config.traces].reshape(5, 5)[2]  # its own row
    assert traces[4] > traces[3]  # columns 3 and 2: it stands there, and it only passed before the first step
    assert traces[2] == traces[4]


def test_on_a_ground_with_more_tunnels_each_is_like_the_only_one_and_has_entries_of_its_own() -> None:
    shape = GROUNDS["single-file"]
    one, three = (
        Excavation(ExcavationConfig(dataclasses.replace(shape, tunnels=n), signs="typed"), agents=2, seed=0)
        for n in (1, 3)
    )
    band = shape.nest_rows * three.burrow.width
    b = one.burrow
    one.place[0] = np.flatnonzero((b.row == (shape.nest_rows - 1) // 2) & b.nest)  # before the mouth
    three.place = one.place + band
    for _ in range(8):
        first, third = (env.step([[RIGHT, RIGHT]])[0] for env in (one, three))
        np.testing.assert_array_equal(first, third)
    assert (three.place == one.place + band).all()
    three.place = np.array([[three.place[0, 0] - band, three.place[0, 1] + band]])
    assert three.entries.value[0, 1] > 0.0
    assert three.entries_now().tolist() == [[0.0, 0.0]]
    refused(ConfigError, "tunnels", Shape, tunnels=0)


def test_slow_agents_move_less_and_finished_worlds_rest() -> None:
    config = dataclasses.replace(LANE, speeds=(1.0, 0.25), horizon=10**6)
    env = Excavation(dataclasses.replace(config, shape=Shape(2, 1, 400, 2)), agents=2, worlds=20, seed=0)
    for _ in range(200):
        env.step(np.full((20, 2), RIGHT))
    moved = env.burrow.column[env.place].mean(0)
    assert moved[0] == 200
    assert moved[1] == pytest.approx(50, abs=10)

    env = lane(1, config=dataclasses.replace(LANE, pellets=1))
    for action in [RIGHT] * 3 + [LEFT] * 3:
        _, _, finished = env.step([[action]])
    assert finished.all()
    _, reward, _ = env.step([[UP]])
    assert not reward.any()


def test_an_episode_goes_on_exactly_from_its_state_and_repeats_from_its_seed() -> None:
    def play(env: Excavation, steps: int, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return [env.step(rng.integers(5, size=(3, 4)))[0] for _ in range(steps)][-1]

    typed = ExcavationConfig(GROUNDS["single-file"], signs="typed")
    env, same, other = (Excavation(typed, agents=4, worlds=3, seed=s) for s in (7, 7, 8))
    np.testing.assert_array_equal(play(env, 20, 0), play(same, 20, 0))
    env.leave(np.arange(4) == np.array([[0], [1], [2]]))
    other.load_state_dict(env.state_dict())
    np.testing.assert_array_equal(play(env, 20, 1), play(other, 20, 1))


def test_impossible_tasks_are_refused() -> None:
    for made, wrong in (
        (Shape, {"tunnel_width": 9}),
        (Shape, {"tunnel_length": 0}),
        *((ExcavationConfig, wrong) for wrong in ({"speeds": (0.0,)}, {"pellets": 0}, {"horizon": 0})),
        *((ExcavationConfig, wrong) for wrong in ({"signs": "smoke"}, {"late": -1}, {"noise": float("nan")})),
        *((Excavation, wrong) for wrong in ({"agents": 13}, {"worlds": 0})),
    ):
        refused(ConfigError, next(iter(wrong)), made, **wrong)
    refused(ConfigError, "chamber", Shape, chamber_rows=1, chamber_columns=1)
    for action in ([[0, 5]], [0, 1]):
        refused(ConfigError, "action", Excavation(agents=2).step, action)


def test_pettingzoo_accepts_it() -> None:
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    from dynamix_lab.excavation.environments import ParallelExcavation

    config = ExcavationConfig(horizon=20)
    parallel_api_test(ParallelExcavation(config, agents=3), num_cycles=50)
    parallel_api_test(ParallelExcavation(dataclasses.replace(LANE, pellets=1), agents=2), num_cycles=200)
    parallel_seed_test(lambda: ParallelExcavation(config, agents=3))
    env = ParallelExcavation(config, agents=3, render_mode="ansi")
    env.reset(seed=0)
    assert str(env.render()).count("o") >= 3
    refused(ConfigError, "render_mode", ParallelExcavation, render_mode="human")


def test_gymnasium_accepts_one_agent_of_many() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    env = gymnasium.make("dynamix_lab.excavation.environments:dynamix/Excavation-v0", agents=3, horizon=30)
    check_env(env.unwrapped)
    env.reset(seed=1)
    assert [env.step(0)[3] for _ in range(30)] == [False] * 29 + [True]
