"""`controller.optimizer_state`: what each worker's optimizer remembers, as one state for a checkpoint."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.ranks import run_ranks
from tests.refused import refused
from tests.runtime.jobs import Training, apart, classes
from tests.runtime.sync.apart_jobs import MEMORY, OPTIMIZERS, net
from tests.union import Script

SHARES = {2: [[20, 16]], 3: [[16, 0, 20]]}
KINDS = ("adamw", "nadam", "momentum", "schedule-free")


def _all_trained(rank: int, saved: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    return {kind: _trained(kind, saved.get(kind), rounds) for kind in KINDS}


def _trained(kind: str, saved: Any, rounds: int) -> dict[str, Any]:
    """A job until it has met so often, or to its end; what it saves, and what this worker's own optimizer has."""
    model, workers = net(), dist.get_world_size()
    optimizer = OPTIMIZERS[kind](model.parameters())
    x, y = classes(240).tensors
    controller, data = apart(Script(SHARES[workers]), 36 // workers), TensorDataset(torch.arange(240), x.double(), y)
    given = {"optimizer": optimizer, "sampling": {"seed": 1}}
    job = Training(controller, data, model, **given, averaging=Averaging(optimizer_state="kept"))
    if saved is not None:
        model.load_state_dict(saved["model"])
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
    found = {"own": own, "seen": seen, "trained": trained, "model": model.state_dict()}
    if rounds:
        found |= {"optimizer": controller.optimizer_state(optimizer), "controller": controller.state_dict()}
        after = optimizer.state_dict()
        assert after["param_groups"] == own["param_groups"]  # it stays as it was
        assert all(torch.equal(after["state"][n][k], own["state"][n][k]) for n in own["state"] for k in own["state"][n])
    controller.close()
    return found


def _mean(values: list[Any], counts: list[int], *, product: bool = False) -> Any:
    values = [value.log() if product else value for value in (torch.as_tensor(v).double() for v in values)]
    mean = sum(n * value for n, value in zip(counts, values, strict=True)) / sum(counts)
    return mean.exp() if product else mean


@pytest.mark.multiproc
def test_three_workers_states_become_one_that_two_go_on_with() -> None:
    ran = run_ranks(_all_trained, 3, {}, 5, timeout_s=100)
    saved = copy.deepcopy(ran[0])  # its memory is that of the other processes, too
    went_on = run_ranks(_all_trained, 2, saved, 0, timeout_s=100)
    for kind in KINDS:
        ranks = [of_rank[kind] for of_rank in ran]
        counts = [of_rank["trained"] for of_rank in ranks]
        assert sum(counts) == 36
        assert min(counts) == 0
        for number, mean in ranks[0]["optimizer"]["state"].items():
            for name, value in mean.items():
                having = [(n, r["own"]["state"][number][name]) for n, r in zip(counts, ranks, strict=True) if n]
                expected = _mean([v for _, v in having], [n for n, _ in having], product=name == "mu_product")
                torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-12)
                assert all(torch.equal(value, of_rank["optimizer"]["state"][number][name]) for of_rank in ranks)
        groups = [of_rank["own"]["param_groups"][0] for of_rank in ranks]
        for name, value in ranks[0]["optimizer"]["param_groups"][0].items():
            expected = float(_mean([group[name] for group in groups], counts)) if name in MEMORY else groups[0][name]
            assert value == (round(expected) if name == "k" else pytest.approx(expected))
            assert value == ranks[1]["optimizer"]["param_groups"][0][name]
        seen = [i for of_rank in (*ranks, *(of_rank[kind] for of_rank in went_on)) for i in of_rank["seen"]]
        assert sorted(seen) == list(range(240))
        assert all(math.isfinite(float(p.sum())) for p in went_on[0][kind]["model"].values())


@pytest.mark.parametrize(("meet", "says"), [("gradients", "meet='parameters'"), ("parameters", "was not given")])
def test_it_is_refused_where_gradients_meet_and_for_a_strange_optimizer(meet: str, says: str) -> None:
    controller = dynamix.Controller("static", 8, meet=meet)
    model = nn.Linear(2, 1)
    optimizer, strange = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    controller.wrap(model, optimizer)
    refused(UsageError, says, controller.optimizer_state, optimizer if meet == "gradients" else strange)
    controller.close()
