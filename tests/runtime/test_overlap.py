"""Averaging(overlap=True): moves travel while the next round's first piece is trained."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.runtime import averaging
from dynamix.runtime.parameters import Averaging
from tests.ranks import run_ranks
from tests.union import Script

SAMPLES, PIECE, LOOK = 203, 4, 3  # at which meeting the model is looked at


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x, torch.randint(3, (SAMPLES,), generator=generator))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def controller_of(shares: list[list[int]]) -> dynamix.Controller:
    given: dict[str, Any] = {"min_batch_size": 0, "max_batch_size": 64, "interval": 2, "micro_batch": PIECE}
    return dynamix.Controller(Script(shares), 12, meet="parameters", lr_rule="none", **given)


def _train(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    controller = controller_of([[12, 12], [20, 4], [24, 0]])
    dataset = data()
    sampler = controller.batch_sampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=case.get("momentum", 0.0))
    how = Averaging(overlap=True, **case.get("how", {}))
    wrapped = controller.wrap(DDP(model) if case.get("ddp") else model, optimizer, averaging=how)
    rounds: list[list[list[int]]] = [[]]
    ends: list[bool] = []
    after: list[list[Tensor]] = []
    looked: list[Tensor] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index, x, y in loader:
            mine = sampler.piece().samples
            with controller.piece():
                F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step()
            if mine:
                rounds[-1].append(index.tolist())
            if controller.met:
                rounds.append([])
                ends.append(controller.epoch_done)
                if len(ends) == LOOK:
                    looked = _looked_at(case.get("look"), controller, model, wrapped, x)
                dist.all_reduce(torch.ones(3))  # the user's own, over the group that others use
        after.append([p.detach().clone() for p in model.parameters()])
    controller.close()
    return {"rounds": rounds[:-1], "ends": ends, "after": after, "looked": looked}


def _looked_at(way: str | None, controller: Any, model: nn.Module, wrapped: nn.Module, x: Tensor) -> list[Tensor]:
    if way == "state_dict":
        return [value.clone() for value in model.state_dict().values()]
    if way == "controller":
        controller.state_dict()
    elif way in ("evaluation", "inference"):
        model.eval()
        with torch.no_grad() if way == "evaluation" else torch.inference_mode():
            model(x)
        model.train()
    return [p.detach().clone() for p in model.parameters()] if way else []


def _replayed(ran: list[dict[str, Any]], case: dict[str, Any]) -> list[list[Tensor]]:
    """The parameters of all workers after each epoch, by the rule in plain words."""
    _, x, y = data().tensors
    workers = [net() for _ in ran]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=case.get("momentum", 0.0)) for m in workers]
    anchor = [p.detach().clone() for p in workers[0].parameters()]
    outer = nesterov(anchor) if "outer" in case.get("how", {}) else None
    sent: list[list[Tensor]] | None = None
    after = []

    def land() -> None:
        nonlocal sent
        if sent is not None:
            with torch.no_grad():
                for model, of_worker in zip(workers, sent, strict=True):
                    for p, mean, then in zip(model.parameters(), anchor, of_worker, strict=True):
                        p.copy_(mean + (p - then))
        sent = None

    for number, end in enumerate(ran[0]["ends"]):
        counts = []
        pieces_of = [of_rank["rounds"][number] for of_rank in ran]
        for model, optimizer, pieces, k in zip(workers, optimizers, pieces_of, range(len(ran)), strict=True):
            for first, piece in enumerate(pieces):
                optimizer.zero_grad()
                F.cross_entropy(model(x[piece]), y[piece]).backward()
                optimizer.step()
                if first == 0 and sent is not None:
                    with torch.no_grad():
                        for p, mean, then in zip(model.parameters(), anchor, sent[k], strict=True):
                            p.copy_(mean + (p - then))
            if not pieces and sent is not None:  # a placeholder moves nothing
                with torch.no_grad():
                    for p, mean in zip(model.parameters(), anchor, strict=True):
                        p.copy_(mean)
            counts.append(sum(map(len, pieces)))
        sent = None
        weights = np.array(counts) / sum(counts)
        moves = [
            sum(w * (list(m.parameters())[i].detach() - a) for w, m in zip(weights, workers, strict=True))
            for i, a in enumerate(anchor)
        ]
        sent = [[p.detach().clone() for p in m.parameters()] for m in workers]
        with torch.no_grad():
            for a, move in zip(anchor, moves, strict=True):
                if outer is None:
                    a.add_(move)
                else:
                    a.grad = -move
        if outer is not None:
            outer.step()
        if end or (number + 1 == LOOK and case.get("look")):
            land()
        if end:
            after.append([p.detach().clone() for p in workers[0].parameters()])
    return after


CASES: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "how": {"optimizer_state": "kept"}},
    {"how": {"outer": nesterov}},
    {"ddp": True, "look": "evaluation"},
    {"look": "state_dict"},
    {"look": "controller"},
    {"look": "inference", "how": {"outer": nesterov}},
]


@pytest.mark.parametrize(
    "case", CASES, ids=["plain", "momentum", "outer", "evaluation", "state_dict", "controller", "inference"]
)
def test_workers_go_on_from_the_mean_with_what_they_have_moved_meanwhile(case: dict[str, Any]) -> None:
    ran = run_ranks(_train, 2, case)
    seen = [i for of_rank in ran for pieces in of_rank["rounds"] for piece in pieces for i in piece]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2)
    expected = _replayed(ran, case)
    assert len(expected) == 2
    for epoch, values in enumerate(expected):
        for a, b, c in zip(ran[0]["after"][epoch], ran[1]["after"][epoch], values, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=0, atol=1e-12)
    for a, b in zip(ran[0]["looked"], ran[1]["looked"], strict=True):
        assert torch.equal(a, b)
    assert bool(ran[0]["looked"]) == bool(case.get("look"))


LINK_S, PIECE_S = 0.06, 0.03


def _linked(rank: int, overlap: bool) -> float:
    """Seconds that this rank has waited for moves which take `LINK_S` to arrive."""
    begun: dict[int, float] = {}
    waited = 0.0
    all_reduce, wait_for = dist.all_reduce, averaging.wait_for

    def slow_all_reduce(*given: Any, **named: Any) -> Any:
        work = all_reduce(*given, **named)
        begun[id(work)] = time.perf_counter()
        return work

    def slow_wait(work: Any, ending: Any) -> None:
        nonlocal waited
        left = begun.pop(id(work), 0.0) + LINK_S - time.perf_counter()
        if left > 0:
            time.sleep(left)
            waited += left
        wait_for(work, ending)

    controller = controller_of([[16, 8]])
    dataset = data()
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, seed=1))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = controller.wrap(model, optimizer, averaging=Averaging(overlap=overlap, optimizer_state="kept"))
    averaging.dist.all_reduce, averaging.wait_for = slow_all_reduce, slow_wait  # type: ignore[attr-defined]
    for _, x, y in loader:
        with controller.piece():
            F.cross_entropy(wrapped(x), y).backward()
            time.sleep(PIECE_S * (1 + 2 * rank))
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    controller.close()
    return waited


def test_a_slow_links_time_is_hidden() -> None:
    plain, hidden = run_ranks(_linked, 2, False), run_ranks(_linked, 2, True)
    assert min(plain) > 7 * LINK_S
    assert hidden[1] < 2.5 * LINK_S  # the epoch's last meeting, which all wait for
    assert hidden[0] < 0.75 * plain[0]  # its first piece takes half of the link's time


def _normalised(rank: int) -> dict[str, Tensor]:
    controller = controller_of([[16, 8]])
    dataset = data()
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, seed=1))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped = controller.wrap(model, optimizer, averaging=Averaging(overlap=True, wire="bfloat16"))
    for _, x, y in loader:
        with controller.piece():
            scale = 100.0 if rank and not controller._coordinator.progress.steps else 1.0  # variances apart at first
            F.cross_entropy(wrapped(x * scale), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    controller.close()
    return model.state_dict()


def test_variances_stay_positive() -> None:
    one, other = run_ranks(_normalised, 2)
    for name, value in one.items():
        assert torch.equal(value, other[name])
        assert value.isfinite().all()
    assert (one["1.running_var"] > 0).all()
