"""MADDPG by AgileRL: it learns the same lessons where it is installed, and says what is missing where it is not."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix_lab.excavation.config import METHODS, ExperimentConfig, available
from dynamix_lab.excavation.experiment import run
from dynamix_lab.excavation.ground import Shape
from dynamix_lab.excavation.learner import evaluate
from dynamix_lab.excavation.lessons import Stage
from dynamix_lab.excavation.maddpg import MADDPGConfig, MADDPGTraining
from dynamix_lab.excavation.world import ExcavationConfig
from tests.refused import refused

SHORT = ExcavationConfig(Shape(2, 2, 3, 2), horizon=100)
INSTALLED = importlib.util.find_spec("agilerl") is not None


@pytest.mark.skipif(INSTALLED, reason="AgileRL is installed")
def test_without_agilerl_it_says_what_to_install_and_is_left_out() -> None:
    refused(ConfigError, r"lab\[maddpg\]", MADDPGTraining)
    refused(ConfigError, "maddpg", run, ExperimentConfig(methods=("s-madrl", "maddpg")), tell=pytest.fail)
    assert available() == tuple(name for name in METHODS if name != "maddpg")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # AgileRL's own
@pytest.mark.skipif(not INSTALLED, reason='AgileRL is not installed: pip install "./lab[maddpg]"')
def test_it_learns_to_fetch_pellets_and_to_work_with_any_number() -> None:
    config = MADDPGConfig(hidden=32, batch=128, warm_up=500, capacity=6_000, learn_every=2)
    stages = (Stage((1,), 600, 1.0), Stage((1, 2), 50, 0.3))
    training = MADDPGTraining(SHORT, config, stages=stages, worlds=8, seed=0)
    training.run()
    assert training.remembered == 650 * 8
    assert (training.memory["seen"][:4_000, 1] == 0).all(), "who was absent is zeros"
    work = evaluate(training.act, SHORT, agents=1, seed=1)
    assert work.reward.mean() > 0
    assert np.isfinite(evaluate(training.act, SHORT, agents=4, seed=1).reward).all()
    again = MADDPGTraining(SHORT, config, stages=stages, worlds=8, seed=0)
    again.run()
    assert (evaluate(again.act, SHORT, agents=1, seed=1).reward == work.reward).all()
    assert available() == METHODS
