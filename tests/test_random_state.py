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
from tests.compression.local import in_threads
from tests.homomorphic.aggregators import join
from tests.runtime.jobs import Training, classes, classifier


def _seed() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def _drawn() -> list[Any]:
    """What a script draws next from each of the generators."""
    return [random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()]


def _decide(name: str) -> None:
    policy = make_policy(name)
    policy.decide(Window.of([32, 32], compute=[0.1, 0.3]), Bounds.of(2))
    policy.load_state_dict(policy.state_dict())


def _probe() -> None:
    for probe in detect(torch.device("cpu")):
        probe.sample()


def _aggregate() -> None:
    from dynamix_homomorphic.aggregator.protocol import ADD

    def work(rank: int, client: Any) -> None:
        client.reduce_((ADD, np.ones(5, dtype=np.int32).view(np.uint8)))
        client.close()

    with AggregatorServer() as server:
        in_threads(join(server, 2), work)


def _load(workers: int) -> None:
    controller = dynamix.Controller("dynamix", 8)
    list(controller.loader(DataLoader(classes(32), batch_size=8, shuffle=True, num_workers=workers)))
    controller.close()


def _train(policy: str, **options: Any) -> None:
    net = classifier()
    _seed()
    training = Training(dynamix.Controller(policy, 8, interval=2, **options), classes(64), net)
    sampler = training.sampler
    for indices in sampler:  # a DataLoader of the user's own draws a seed when it is iterated, as it does without us
        x, y = classes(64)[indices]
        training.loss(x, y).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.controller.step()
    training.controller.state_dict()
    training.controller.close()


DONE: dict[str, Callable[[], Any]] = {
    **{f"policy {name}": lambda name=name: _decide(name) for name in [*policy_names(), "guarded:dynamix"]},
    "an untrained policy": LearnedPolicy,
    "an untrained policy of the paper": AdditivePolicy,
    "probes": _probe,
    "an aggregator": _aggregate,
    "a loader": lambda: _load(0),
    "a loader with processes": lambda: _load(2),
    "a job": lambda: _train("dynamix"),
    "a guarded job that adapts": lambda: _train("guarded:stigmergic", global_batch="adaptive"),
}


@pytest.mark.parametrize("name", DONE)
def test_nothing_moves_the_global_generators(name: str) -> None:
    _seed()
    want = _drawn()
    _seed()
    DONE[name]()
    assert _drawn() == want


def test_a_network_is_made_on_the_cpu_whatever_the_scripts_default_device_is() -> None:
    with torch.device("meta"):
        assert {p.device.type for p in make_policy("dynamix").net.parameters()} == {"cpu"}  # type: ignore[attr-defined]
