"""The learners and their curriculum: they learn, go on exactly from where they were stopped, and see who is there."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix_lab.excavation.ground import GROUNDS, Burrow, Shape, drawn, held_out
from dynamix_lab.excavation.learner import DQN, DQNConfig, DQNTraining, evaluate, without_traces
from dynamix_lab.excavation.lessons import Lessons, Stage
from dynamix_lab.excavation.mappo import MAPPOConfig, MAPPOTraining, TeamCriticNet
from dynamix_lab.excavation.world import ExcavationConfig
from tests.refused import refused

SHORT = ExcavationConfig(Shape(2, 2, 3, 2), horizon=100)
TINY = DQNConfig(hidden=16, batch=32, capacity=500, warm_up=64, target_every=10)
STAGES = (Stage((1,), 40, 1.0), Stage((1, 2), 40, 0.3))


def q_learning(seed: int) -> Any:
    return DQNTraining(SHORT, TINY, stages=STAGES, worlds=4, seed=seed)


def with_resters(seed: int) -> Any:
    task = dataclasses.replace(SHORT, shape=GROUNDS["single-file"], signs="typed")
    return DQNTraining(task, dataclasses.replace(TINY, resters=(0.0, 0.5)), stages=STAGES, worlds=4, seed=seed)


def mappo(seed: int) -> Any:
    return MAPPOTraining(SHORT, MAPPOConfig(hidden=16, rollout=20, rows=64), stages=STAGES, worlds=4, seed=seed)


def team(seed: int, stages: tuple[Stage, ...] = STAGES) -> Any:
    """Some rest, and every episode has a ground of its own; episodes end between the two runs."""
    task = ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=15)
    config = MAPPOConfig(hidden=16, rollout=20, rows=64, traces=True, resters=(0.2, 0.5))
    return MAPPOTraining(task, config, stages=stages, worlds=4, seed=seed, grounds=drawn)


def weights(training: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in training.learner.net.parameters()])


@pytest.mark.parametrize(
    ("make", "stop"), [(q_learning, 30), (q_learning, 40), (with_resters, 50), (mappo, 40), (team, 60)]
)
def test_stopped_and_resumed_it_ends_in_the_same_weights(make: Any, stop: int) -> None:
    whole, first, then = make(3), make(3), make(99)
    whole.run()
    first.run(stop)
    half, state, kept = weights(first), first.state_dict(), io.BytesIO()
    first.run(stop + 5)  # a state kept in memory is not changed by what goes on
    torch.save(state, kept)
    kept.seek(0)
    then.lessons.seed = 3  # a resumed job has its configuration
    then.load_state_dict(torch.load(kept, weights_only=False))
    then.run()
    assert torch.equal(weights(whole), weights(then))
    assert not torch.equal(weights(whole), half)


def test_one_agent_learns_to_fetch_pellets() -> None:
    training = DQNTraining(
        SHORT, DQNConfig(hidden=32, batch=128, warm_up=500), stages=(Stage((1,), 1000, 1.0),), worlds=8, seed=0
    )
    training.run()
    rng = np.random.default_rng(0)
    learned = evaluate(training.learner.act, SHORT, agents=1, seed=1)
    random = evaluate(lambda seen: rng.integers(5, size=seen.shape[:-1]), SHORT, agents=1, seed=1)
    assert learned.delivered.mean() > 10  # 16 at best
    assert random.delivered.mean() < 4


def test_without_traces_nothing_depends_on_them_and_with_them_it_does() -> None:
    task, rng = ExcavationConfig(), np.random.default_rng(0)
    seen = rng.random((500, task.features), dtype=np.float32)
    other = seen.copy()
    other[:, task.traces] = rng.random(other[:, task.traces].shape)
    for config, same in ((without_traces(), True), (DQNConfig(), False)):
        first, learner = (DQN(task.features, task.traces, config, seed=0) for _ in range(2))
        assert (first.act(seen) == learner.act(other)).all() == same
        learner.remember(seen, np.zeros(500, np.int64), np.zeros(500), other, np.ones(500, bool))
        assert bool((learner.memory["then"][:, task.traces] == 0).all()) == same


def test_it_learns_the_worth_that_munchausen_dqn_has_on_a_task_of_one_state() -> None:
    """Fixed point of one state, five actions with rewards r: q = r + m max(t log p, -1) + g t logsumexp(q / t)."""
    rewards = np.array([0.0, 0.1, 0.2, 0.3, 0.4])
    config = DQNConfig(hidden=16, batch=64, capacity=500, warm_up=500, target_every=20, gamma=0.5, reward_scale=1.0)
    learner = DQN(2, slice(1, 2), config, seed=0)
    seen, action = np.ones((500, 2), np.float32), np.arange(500) % 5
    learner.remember(seen, action, rewards[action], seen, np.ones(500, bool))
    for _ in range(1500):
        learner.learn()
    worth, heat = np.zeros(5), config.temperature
    for _ in range(200):
        soft = heat * np.log(np.exp(worth / heat).sum())
        worth = rewards + config.munchausen * np.maximum(worth - soft, -1.0) + config.gamma * soft
    with torch.no_grad():
        np.testing.assert_allclose(learner.net(torch.ones(2)).numpy(), worth, atol=0.02)
    drawn = np.bincount(learner.act(np.ones((4000, 2), np.float32)), minlength=5) / 4000
    np.testing.assert_allclose(drawn, np.exp((worth - soft) / heat), atol=0.04)


def test_the_reward_is_shared_within_a_world_and_the_rate_falls_to_nothing() -> None:
    rewards = {}
    for shared in (0.0, 0.5, 1.0):
        config = dataclasses.replace(TINY, shared=shared, cooling=0.5, reward_scale=1.0, warm_up=500, capacity=500)
        training = DQNTraining(SHORT, config, stages=(Stage((1, 2), 40, 1.0),), worlds=2, seed=0)
        training.run(20)
        assert training.learner.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
        training.run()
        assert training.learner.optimizer.param_groups[0]["lr"] == 0.0
        rewards[shared] = training.learner.memory["reward"][:120].view(40, 3).numpy()
    own, half, team = rewards.values()
    np.testing.assert_allclose(team[:, 0], own[:, 0], err_msg="alone")
    np.testing.assert_allclose(team[:, 1:], np.repeat(own[:, 1:].mean(1, keepdims=True), 2, 1), rtol=1e-5)
    np.testing.assert_allclose(half, (own + team) / 2, rtol=1e-5, atol=1e-6)
    assert (own[:, 1] != own[:, 2]).any()


def test_memory_keeps_the_newest_and_the_target_follows_late() -> None:
    learner = DQN(2, slice(1, 2), DQNConfig(hidden=4, batch=4, warm_up=8, capacity=10, target_every=3), seed=0)
    assert np.isnan(learner.learn())
    for i in range(6):
        seen = np.full((4, 2), i, np.float32)
        learner.remember(seen, np.zeros(4, np.int64), np.full(4, 10.0 * i), seen, np.ones(4, bool))
    assert sorted(learner.memory["reward"].tolist()) == [3.0] * 2 + [4.0] * 4 + [5.0] * 4
    for update in range(1, 4):
        assert np.isfinite(learner.learn())
        same = all(
            torch.equal(a, b) for a, b in zip(learner.net.parameters(), learner.target.parameters(), strict=True)
        )
        assert same == (update == 3)


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        (DQNConfig, {"batch": 100, "warm_up": 10}, "warm_up"),
        *((DQNConfig, wrong, "temperature") for wrong in ({"temperature": 0.0}, {"munchausen": 1.0})),
        *((DQNConfig, wrong, "gamma") for wrong in ({"gamma": 2.0}, {"learning_rate": float("nan")})),
        *((DQNConfig, wrong, "gamma") for wrong in ({"target_every": 0}, {"batch": 0, "warm_up": 0})),
        *((DQNConfig, wrong, "cooling") for wrong in ({"shared": 1.1}, {"cooling": -1.0})),
        *((MAPPOConfig, wrong, next(iter(wrong))) for wrong in ({"rollout": 0}, {"cooling": 2.0})),
    ],
)
def test_impossible_settings_are_refused(config: Any, settings: dict[str, Any], named: str) -> None:
    refused(ConfigError, named, config, **settings)


@pytest.mark.parametrize(
    "stages",
    [
        (),
        (Stage((1,), 0, 1.0),),
        (Stage((), 5, 1.0),),
        (Stage((1, 2, 4), 5, 1.0),),
        (Stage(1, 5, 1.0),),  # type: ignore[arg-type]
        (Stage((1,), 5, 1.0), Stage((50,), 5, 1.0)),
        (Stage((1,), 5, 1.5),),
    ],
)
def test_impossible_curricula_are_refused_before_the_first_step(stages: tuple[Stage, ...]) -> None:
    refused(ConfigError, "stages", DQNTraining, SHORT, stages=stages, worlds=2)
    refused(ConfigError, "stages", MAPPOTraining, SHORT, stages=(Stage((1,), 150, 1.0),))
    refused(ConfigError, "worlds", Lessons, SHORT, worlds=0, seed=0)
    for wrong in ((0.0, 1.0), (0.4, 0.2)):
        refused(ConfigError, "resters", Lessons, SHORT, stages=STAGES, worlds=4, seed=0, resters=wrong)


def test_a_stage_shares_its_worlds_out_and_the_absent_are_zeros() -> None:
    lessons = Lessons(
        dataclasses.replace(SHORT, horizon=50),
        stages=(Stage((1,), 2, 1.0), Stage((1, 2, 3), 60, 0.3)),
        worlds=7,
        seed=0,
    )
    assert lessons.present.tolist() == [[True]] * 7
    for _ in range(2):
        lessons.step(np.zeros((7, 1), dtype=int))
    for _ in range(60):  # past the horizon
        seen, who = lessons.observe(), lessons.present
        assert who.sum(-1).tolist() == [1, 1, 2, 2, 2, 3, 3]
        then, reward, goes_on = lessons.step(np.random.default_rng(0).integers(5, size=who.shape))
        for values in (seen[~who], then[~who], reward[~who]):
            assert not values.any()
        assert goes_on.all()
        assert seen[who].any(-1).all()
    assert lessons.done == lessons.steps == 62
    assert lessons.stage.agents == (1, 2, 3)


def test_every_episode_has_a_ground_of_its_own_and_none_is_held_out() -> None:
    measured = [shape for shape, _ in held_out()]
    assert len(set(measured)) == 10
    task = ExcavationConfig(GROUNDS["single-file"], horizon=5)
    lessons = Lessons(
        task,
        stages=(Stage((2, 12), 200, 0.3),),
        worlds=2,
        seed=0,
        grounds=lambda rng: drawn(rng, but=measured),
    )
    grounds = []
    for step in range(200):
        if step % 5 == 0:
            grounds += [env.burrow.shape for _, env, _ in lessons.parts]
        seen = lessons.observe()
        lessons.step(np.random.default_rng(step).integers(5, size=lessons.present.shape))
        assert seen[lessons.present].any(-1).all()
    assert len(set(grounds)) > 70
    assert not {*grounds} & {*measured}
    for shape in (*grounds, *measured):
        assert shape.tunnel_width == 1
        assert 4 <= shape.tunnel_length <= 12
        assert Burrow(shape, margin=2).nest.sum() >= 18


def test_who_rests_does_not_learn_to_act_but_counts_for_the_critic() -> None:
    """Other actions of who rested change nothing; other actions of who acted do."""
    training, other, third = (team(0, (Stage((4,), 40, 1.0),)) for _ in range(3))
    episode, _, _ = (each.play() for each in (training, other, third))
    assert not episode.acted.all()
    assert (episode.mask & ~episode.acted).any()
    idle = torch.where(episode.acted, episode.chosen, (episode.chosen + 1) % 5)
    moved = torch.where(episode.acted, (episode.chosen + 1) % 5, episode.chosen)
    training.learner.update([episode])
    other.learner.update([dataclasses.replace(episode, chosen=idle)])
    third.learner.update([dataclasses.replace(episode, chosen=moved)])
    assert torch.equal(weights(training), weights(other))
    assert not torch.equal(weights(training), weights(third))


def test_the_absent_are_not_remembered() -> None:
    stages = (Stage((1, 3), 40, 1.0),)
    training = DQNTraining(SHORT, TINY, stages=stages, worlds=4, seed=0)
    training.run()
    assert training.learner.remembered == 40 * (2 * 1 + 2 * 3)
    assert (training.learner.memory["seen"][: training.learner.remembered] != 0).any(-1).all()


def test_the_absent_change_nothing_in_mappos_critic() -> None:
    net, rng = TeamCriticNet(6, 8, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    observed, mask = torch.rand(5, 3, 6, generator=rng), torch.tensor([True, True, False]).expand(5, 3)
    other = observed.clone()
    other[:, 2] = 9.0
    alone = net(observed[:, :2], torch.ones(5, 2, dtype=torch.bool))[1]
    for padded in (observed, other):
        torch.testing.assert_close(net(padded, mask)[1], alone)
