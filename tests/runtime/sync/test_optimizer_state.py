"""`controller.optimizer_state`: what each worker's optimizer remembers, as one state for a checkpoint."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, apart, classes, classifier
from tests.union import Script

SHARES = {2: [[20, 16]], 3: [[16, 0, 20]]}
OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam, "sgd": torch.optim.SGD}


def _train(rank: int, workers: int, kind: str, saved: Any, rounds: int) -> dict[str, Any]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    options = {"momentum": 0.9} if kind == "sgd" else {}
    optimizer = OPTIMIZERS[kind](net.parameters(), lr=0.01, **options)
    x, y = classes(240).tensors
    controller, data = apart(Script(SHARES[workers]), 36 // workers), TensorDataset(torch.arange(240), x.double(), y)
    given = {"optimizer": optimizer, "sampling": {"seed": 1}}
    job = Training(controller, data, net, **given, averaging=Averaging(optimizer_state="kept"))
    if saved is not None:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        controller.load_state_dict(saved["controller"])
    seen: list[int] = []
    trained = meetings = 0
    for index, bx, by in job.loader:
        mine = job.sampler.piece().samples
        job.train_piece(bx, by)
        seen += index.tolist() if mine else []
        trained += mine
        meetings += controller.met
        if controller.met and meetings == rounds:
            break
        if controller.met:
            trained = 0
    own = copy.deepcopy(optimizer.state_dict())
    found = {"own": own, "seen": seen, "trained": trained, "model": net.state_dict()}
    if rounds:
        found |= {"optimizer": controller.optimizer_state(optimizer), "controller": controller.state_dict()}
        after = optimizer.state_dict()["state"]
        assert all(torch.equal(after[n][k], own["state"][n][k]) for n in after for k in after[n])  # it stays as it was
    controller.close()
    return found


@pytest.mark.parametrize("kind", ["adamw", "nadam", "sgd"])
def test_three_workers_states_become_one_that_two_go_on_with(kind: str) -> None:
    ran = run_ranks(_train, 3, 3, kind, None, 5)
    counts = [of_rank["trained"] for of_rank in ran]
    assert sum(counts) == 36
    assert min(counts) == 0
    for number, mean in ran[0]["optimizer"]["state"].items():
        for name, value in mean.items():
            product = name == "mu_product"
            own = [of_rank["own"]["state"][number][name].double() for of_rank in ran]
            own = [v.log() if product else v for v in own]
            expected = sum(n * v for n, v in zip(counts, own, strict=True)) / 36
            expected = expected.exp() if product else expected
            torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-12)
            assert all(torch.equal(value, of_rank["optimizer"]["state"][number][name]) for of_rank in ran)
    assert ran[0]["optimizer"]["param_groups"] == ran[0]["own"]["param_groups"]
    saved = {name: ran[0][name] for name in ("model", "optimizer", "controller")}
    went_on = run_ranks(_train, 2, 2, kind, saved, 0)
    seen = [i for of_rank in (*ran, *went_on) for i in of_rank["seen"]]
    assert sorted(seen) == list(range(240))
    assert all(math.isfinite(float(p.sum())) for p in went_on[0]["model"].values())


def _between(rank: int) -> None:
    controller = dynamix.Controller(Script([[8, 8]]), 8, max_batch_size=64, micro_batch=4, meet="parameters")
    net = classifier()
    given = {"optimizer": torch.optim.AdamW(net.parameters()), "averaging": Averaging(optimizer_state="kept")}
    job = Training(controller, classes(240), net, **given)
    for x, y in job.loader:
        job.train_piece(x, y)
        if not controller.met:
            controller.optimizer_state(job.optimizer)


def test_between_meetings_it_is_refused() -> None:
    for outcome in run_ranks(_between, 2, expect_failure=True):
        assert "models differ between two meetings" in str(outcome)


def test_where_gradients_meet_it_is_refused() -> None:
    controller = dynamix.Controller("static", 8)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller.wrap(net, optimizer)
    with pytest.raises(UsageError, match="meet='parameters'"):
        controller.optimizer_state(optimizer)
    controller.close()


def test_a_strange_optimizer_is_refused() -> None:
    controller = dynamix.Controller("static", 8, meet="parameters")
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    controller.wrap(net, optimizer)
    with pytest.raises(UsageError, match="was not given"):
        controller.optimizer_state(torch.optim.SGD(net.parameters(), lr=0.1))
    controller.close()
