"""Averaging(early=True): a worker that is late meets with what it has, and trains the rest in its next round."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.runtime.parameters import Averaging
from tests.ranks import run_ranks
from tests.union import Script

SAMPLES, PIECE, SLOW_S = 331, 4, 0.04


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x, torch.randint(3, (SAMPLES,), generator=generator))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def controller_of(shares: list[list[int]], workers: int, **options: Any) -> dynamix.Controller:
    given: dict[str, Any] = {"min_batch_size": 0, "max_batch_size": 64, "interval": 2, "micro_batch": PIECE}
    given["lr_rule"] = "none"  # else a part of a piece would be a smaller step
    policy = options.pop("policy", None) or Script(shares)
    return dynamix.Controller(policy, 48 // workers, **{**given, "meet": "parameters", **options})


def _train(rank: int, workers: int, shares: list[list[int]], case: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, or up to a meeting with something left; by round what was trained, and the model after it."""
    controller = controller_of(shares, workers)
    dataset = data()
    sampler = controller.batch_sampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=case.get("num_workers", 0))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = controller.wrap(model, optimizer, averaging=Averaging(early=True))
    if (saved := case.get("state")) is not None:
        model.load_state_dict(saved["model"])
        controller.load_state_dict(saved["controller"])
    slow = case.get("slow", ())
    rounds: list[list[list[int]]] = [[]]
    weights: list[list[Tensor]] = []
    lefts: list[list[int]] = []
    waits: list[float] = []
    seen: list[int] = []
    found: dict[str, Any] = {}
    stop_after, broken = case.get("stop"), False
    while len(lefts) < 10_000:
        for index, x, y in loader:
            mine = sampler.piece().samples
            with controller.piece():
                F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(SLOW_S if rank in slow else 0.001)
            began = time.perf_counter()
            controller.step()
            if mine:
                rounds[-1].append(index.tolist())
                seen += index.tolist()
            if controller.met:
                waits.append(time.perf_counter() - began)
                rounds.append([])
                weights.append([p.detach().clone() for p in model.parameters()])
                lefts.append(controller._coordinator.meetings._left.tolist())
                if controller.stopping:
                    found |= {"stopped": len(lefts)}
                    break
                if case.get("request") == len(lefts) and rank == 0:
                    controller.request_stop()
                if any(lefts[-1]) and stop_after and len(lefts) >= stop_after and not broken:
                    broken = True
                    if case["then"] == "save":
                        found |= {"model": model.state_dict(), "controller": controller.state_dict()}
                    break
        if "stopped" in found or (broken and case["then"] == "save"):
            break
        if controller.epoch_done and sampler.epoch == 1 and "request" not in case:
            break
    controller.close()
    return found | {
        "rounds": rounds[:-1],
        "weights": weights,
        "lefts": lefts,
        "waits": waits,
        "seen": seen,
        "samples": controller.samples_seen,
    }


def _equal_after_every_meeting(ran: list[dict[str, Any]]) -> None:
    assert len({len(of_rank["weights"]) for of_rank in ran}) == 1
    for of_rank in ran:
        assert of_rank["lefts"] == ran[0]["lefts"]
        for one, other in zip(of_rank["weights"], ran[0]["weights"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _replayed(ran: list[dict[str, Any]]) -> None:
    """Each round is the mean of what the workers trained in it, by the samples that they really trained."""
    _, x, y = data().tensors
    mean = [p.detach().clone() for p in net().parameters()]
    for number, after in enumerate(ran[0]["weights"]):
        moved, counts = [], []
        for of_rank in ran:
            model = net()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), mean, strict=True):
                    parameter.copy_(value)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for piece in of_rank["rounds"][number]:
                optimizer.zero_grad()
                F.cross_entropy(model(x[piece]), y[piece]).backward()
                optimizer.step()
            moved.append([p.detach() for p in model.parameters()])
            counts.append(sum(map(len, of_rank["rounds"][number])))
        shares = np.array(counts) / sum(counts)
        mean = [sum(w * p for w, p in zip(shares, of, strict=True)) for of in zip(*moved, strict=True)]
        for expected, found in zip(mean, after, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        mean = after


CASES: list[tuple[int, list[list[int]], dict[str, Any]]] = [
    (3, [[16, 16, 16]], {"slow": (2,)}),
    (3, [[16, 0, 32], [20, 8, 20]], {"slow": (2,)}),
    (4, [[12, 12, 12, 12]], {"slow": (2, 3)}),
    (2, [[24, 24], [20, 28]], {"slow": (1,), "num_workers": 1}),
    (3, [[16, 16, 16]], {}),
]


@pytest.mark.parametrize(("workers", "shares", "case"), CASES)
def test_late_workers_meet_with_what_they_have(workers: int, shares: list[list[int]], case: dict[str, Any]) -> None:
    ran = run_ranks(_train, workers, workers, shares, case)
    _equal_after_every_meeting(ran)
    seen = [i for of_rank in ran for i in of_rank["seen"]]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2)
    assert all(of_rank["samples"] == 2 * SAMPLES for of_rank in ran)
    _replayed(ran)
    if case.get("slow"):
        assert any(map(any, ran[0]["lefts"]))
        assert all(left <= 64 for of_round in ran[0]["lefts"] for left in of_round)


def _stalled(rank: int) -> list[float]:
    """Of three ranks one stalls at every piece of one round; by meeting, the seconds that this rank waits."""
    controller = controller_of([[16, 16, 16]], 3)
    dataset = data()
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset, seed=1))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = controller.wrap(model, optimizer, averaging=Averaging(early=True))
    waits: list[float] = []
    for _, x, y in loader:
        with controller.piece():
            F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.5 if rank == 1 and len(waits) == 2 else 0.005)
        began = time.perf_counter()
        controller.step()
        if controller.met:
            waits.append(time.perf_counter() - began)
            if len(waits) == 5:
                break
    controller.close()
    return waits


def test_others_wait_for_the_piece_of_a_stalled_rank_and_not_for_its_share() -> None:
    ran = run_ranks(_stalled, 3)
    for rank in (0, 2):  # on a busy machine word of them may come while it is in its second piece
        assert 0.3 < ran[rank][2] < 1.6, ran  # four pieces would take 2 s


@pytest.mark.parametrize("then", ["save", "begin anew"])
@pytest.mark.parametrize("workers", [3, 2])
def test_what_is_left_at_a_meeting_is_dealt_to_whoever_goes_on(then: str, workers: int) -> None:
    if then == "begin anew" and workers == 2:
        return  # it is the same job
    shares = [[16, 16, 16]]
    ran = run_ranks(_train, 3, 3, shares, {"slow": (1,), "stop": 3, "then": then})
    _equal_after_every_meeting(ran)
    if then == "begin anew":
        seen = [i for of_rank in ran for i in of_rank["seen"]]
        assert sorted(seen) == sorted([*range(SAMPLES)] * 2)
        return
    unused = ran[0]["controller"]["source"]["unused"]
    assert unused == ran[0]["lefts"][-1]
    assert sum(unused) > 0
    states = [of_rank["controller"]["source"] for of_rank in ran]
    assert all(state == states[0] for state in states)
    went_on = run_ranks(
        _train, workers, workers, [[48 // workers] * workers], {"slow": (1,), "state": ran[0], "stop": None}
    )
    _equal_after_every_meeting(went_on)
    seen = [i for of_rank in (*ran, *went_on) for i in of_rank["seen"]]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2)


def test_a_stop_is_agreed_on_while_samples_are_left() -> None:
    ran = run_ranks(_train, 3, 3, [[16, 16, 16]], {"slow": (2,), "request": 2})
    assert len({of_rank["stopped"] for of_rank in ran}) == 1
    _equal_after_every_meeting(ran)


def _learned(rank: int) -> list[int]:
    controller = controller_of([], 2, policy="lb_bsp")
    dataset = data()
    sampler = controller.batch_sampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = controller.wrap(model, optimizer, averaging=Averaging(early=True))
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for _, x, y in loader:
            with controller.piece():
                loss = F.cross_entropy(wrapped(x), y)
                time.sleep(len(x) * (1e-3, 4e-3)[rank])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
    sizes: list[int] = controller.batch_sizes.tolist()
    controller.close()
    return sizes


@pytest.mark.flaky(reruns=2)  # speeds are real sleeps here, and others may have the processor meanwhile
def test_policies_see_what_late_workers_really_train() -> None:
    for sizes in run_ranks(_learned, 2):
        assert sum(sizes) == 48
        assert 2.0 < sizes[0] / sizes[1] < 7.0  # the speeds differ by 4


class _Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.randn(64, 6))


def _stream(rank: int) -> None:
    controller = dynamix.Controller("static", 8, micro_batch=4, meet="parameters")
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller.wrap(model, optimizer, averaging=Averaging(early=True))
    with pytest.raises(UsageError, match="batch_sampler"):
        next(iter(controller.stream(_Numbers())))


def test_streams_are_refused() -> None:
    run_ranks(_stream, 2)
