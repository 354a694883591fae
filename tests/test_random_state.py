"""The global generators are the user's: a script draws the same numbers under every policy, with every loader."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import dynamix
from dynamix.policies import make_policy, policy_names
from dynamix.policies.learned.policy import LearnedPolicy
from dynamix.probes.base import detect
from dynamix.window import Bounds, Window
from dynamix_homomorphic.aggregator.server import AggregatorServer
from dynamix_lab.papers.additive import AdditivePolicy
from tests.homomorphic.aggregators import join
from tests.runtime.jobs import classes


def _decide(policy: Any) -> None:
    policy.decide(Window.of([32, 32], compute=[0.1, 0.3]), Bounds.of(2))
    policy.load_state_dict(policy.state_dict())


def _aggregate() -> None:
    with AggregatorServer() as server:
        join(server, 1)[0].close()


def _load(workers: int) -> None:
    plain = DataLoader(classes(32), batch_size=8, shuffle=True, num_workers=workers)
    list(dynamix.Controller("dynamix", 8).loader(plain))


DONE: dict[str, Callable[[], Any]] = {
    **{f"{name}": lambda name=name: _decide(make_policy(name)) for name in [*policy_names(), "guarded:dynamix"]},
    "untrained": LearnedPolicy,
    "untrained, of the paper": AdditivePolicy,
    "probes": lambda: [probe.sample() for probe in detect(torch.device("cpu"))],
    "an aggregator": _aggregate,
    "a loader": lambda: _load(0),
    "a loader with processes": lambda: _load(2),
}


@pytest.mark.parametrize("name", DONE)
def test_nothing_moves_the_global_generators(name: str) -> None:
    drawn = []
    for done in (lambda: None, DONE[name]):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        done()
        drawn.append([random.random(), *np.random.rand(3), *torch.rand(3).tolist()])
    assert drawn[0] == drawn[1]
