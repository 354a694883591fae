"""The curriculum: worlds shared out among numbers of agents, and nobody learns from who is not there."""

from __future__ import annotations

import numpy as np
import torch

from dynamix_lab.excavation.ground import Shape
from dynamix_lab.excavation.learner import DQNConfig, DQNTraining
from dynamix_lab.excavation.lessons import Lessons, Stage
from dynamix_lab.excavation.mappo import TeamCriticNet
from dynamix_lab.excavation.world import ExcavationConfig

SHORT = ExcavationConfig(Shape(2, 2, 3, 2), horizon=50)
TINY = DQNConfig(hidden=8, batch=16, capacity=10_000, warm_up=32)


def test_a_stage_shares_its_worlds_out_and_the_absent_are_zeros() -> None:
    lessons = Lessons(SHORT, stages=(Stage((1,), 2, 1.0), Stage((1, 2, 3), 60, 0.3)), worlds=7, seed=0)
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
