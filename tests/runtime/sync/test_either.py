"""meet="auto": rounds over gradients and rounds apart in one job, and from one to the other and back."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import UsageError
from dynamix.model.auto_sync import AutoSync
from dynamix.model.sync_schedule import Ask, Conditions
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds, Ints, Window
from tests.ranks import refusal, run_cases, run_ranks
from tests.runtime.jobs import Training, decided, ends_apart, in_turns, wait_for_decisions
from tests.runtime.sync.apart_jobs import nesterov
from tests.runtime.sync.test_apart import net
from tests.union import Script, larger

SHARES = {2: [[10, 6], [5, 11], [14, 2]], 3: [[10, 6, 8], [4, 15, 5]]}
GROWING = {2: [[10, 6], [16, 12], [24, 10], [8, 6]], 3: [[10, 6, 8], [9, 9, 9]]}
SAMPLES, BATCH = 331, 8  # of the data set, of a worker's step


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x, x[:, :3].argmax(1))


def made(case: dict[str, Any]) -> Training:
    model = net(case.get("kind", "plain"))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if case.get("adam"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    grows = case.get("more", {}).get("global_batch") == "adaptive"
    shares = Script((GROWING if grows else SHARES)[dist.get_world_size()])
    wait_for_decisions()
    controller = dynamix.Controller(shares, BATCH, interval=4, meet="auto", **case.get("more", {}))
    how = Averaging(**case["how"]) if "how" in case else None
    given = {"optimizer": optimizer, "sampling": {"seed": 1}, "ddp": {"bucket_cap_mb": 1e-4}}
    return Training(controller, dataset(), model, **given, num_workers=case.get("num_workers", 0), averaging=how)


class Seen:
    """What a rank did: by round its way, the samples trained, the model after it; and the union gradient's error."""

    def __init__(self) -> None:
        self.apart: list[bool] = []
        self.indices: list[int] = []
        self.weights: list[Tensor] = []
        self.worst = 0.0
        self.pieces: list[int] = []  # by round, of a worker's own steps
        self.factors: list[tuple[float, float]] = []  # on the learning rate, and what it should be


def train(job: Training, seen: Seen, *, rounds: int | None = None, epochs: int = 2, rank: int = 0) -> None:
    controller, model = job.controller, job.model
    for _ in range(epochs):
        for index, inputs, target in job.loader:
            piece = job.sampler.piece()
            with controller.piece():
                loss = job.backward(inputs, target)
            assert controller.optimizer_due
            if not piece.round.apart and not any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
                error = job.union_error(lambda net, index, x, y: F.cross_entropy(net(x), y), seed=1)
                seen.worst = larger(seen.worst, error)
            factor, plan = controller.metrics()["lr_factor"], piece.plan
            job.finish(loss=loss)
            if plan.regular and piece.samples in (plan.round.piece, plan.counts[rank]):
                seen.factors.append(
                    (factor, (plan.round.at_once if plan.round.apart else plan.samples) / controller.base_batch)
                )
            seen.indices += index.tolist() if piece.samples else []
            if controller.met:
                seen.apart.append(piece.round.apart)
                seen.pieces.append(piece.round.piece)
                kept = (t.detach().flatten().double() for t in model.state_dict().values())
                seen.weights.append(torch.cat([*kept]))
                if rounds is not None and len(seen.apart) == rounds:
                    return


CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"how": {"optimizer_state": "kept"}, "num_workers": 2},
        {"how": {"optimizer_state": "reset"}, "more": {"lr_rule": "none"}},
        {"how": {"outer": nesterov}},
        {"more": {"global_batch": "adaptive", "lr_rule": "linear"}},
    ],
    3: [{"kind": "batchnorm", "adam": True}],
}


def whole(rank: int) -> list[Seen]:
    in_turns()
    told = []
    for case in CASES[dist.get_world_size()]:
        job, seen = made(case), Seen()
        train(job, seen, rank=rank)
        job.controller.close()
        told.append(seen)
    return told


@pytest.mark.multiproc
@pytest.mark.parametrize("workers", CASES)
def test_a_job_goes_over_to_the_other_way_and_back(workers: int) -> None:
    ran = run_ranks(whole, workers, timeout_s=100)
    for case, *ranks in zip(CASES[workers], *ran, strict=True):
        ways, more, buffers = ranks[0].apart, case.get("more", {}), case.get("kind") == "batchnorm"
        changes = sum(one != other for one, other in itertools.pairwise(ways))
        assert not ways[0]
        assert changes >= 3
        assert len(set(ranks[0].pieces)) >= (3 if more.get("global_batch") else 2)
        for seen in ranks:
            assert seen.apart == ways
            assert seen.worst < 1e-12
            if more.get("lr_rule") != "none" and not case.get("adam"):
                assert all(factor == pytest.approx(wanted) for factor, wanted in seen.factors)
            for apart, own, first in zip(ways, seen.weights, ranks[0].weights, strict=True):
                # Over gradients buffers are each rank's own, as under DDP.
                assert torch.equal(own, first) or (buffers and not apart)
        assert sorted(i for seen in ranks for i in seen.indices) == sorted([*range(SAMPLES)] * 2)


def replayed(rank: int, events: str) -> tuple[Seen, Seen]:
    found = []
    for more in ({"events": events}, {"replay": events}):
        job, seen = made({"more": {"global_batch": "adaptive", **more}}), Seen()
        if "events" in more:
            in_turns()
        train(job, seen, rank=rank)
        job.controller.close()
        found.append(seen)
    return found[0], found[1]


@pytest.mark.multiproc
def test_a_recorded_run_whose_batch_moved_is_run_again(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    for first, again in run_ranks(replayed, 2, str(events)):
        assert len(set(first.pieces)) >= 3
        assert (again.pieces, again.indices) == (first.pieces, first.indices)
        assert all(map(torch.equal, again.weights, first.weights))
    changes = [event for event in decided(events) if event["decision"] == "new"]
    assert {event.get("piece", 0) for event in changes} == {*first.pieces}


STOPS: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda meetings, piece: meetings == 2 and not piece.round.apart),
    ({}, lambda meetings, piece: meetings == 6 and piece.round.apart),
    ({"global_batch": "adaptive"}, lambda meetings, piece: piece.round.piece > BATCH),
]


def resumed(number: int) -> float:
    in_turns()
    more, stop = STOPS[number]
    return ends_apart(lambda: made({"adam": True, "more": more}), stop)


@pytest.mark.multiproc
def test_a_saved_job_goes_on_in_its_way() -> None:
    """It is saved after a round over gradients, after one apart, and after one apart whose pieces have grown."""
    for apart in run_cases(resumed, 2, range(len(STOPS)), timeout_s=100):
        assert max(apart) < 1e-12


KINDS: list[dict[str, Any]] = [{}, {"global_batch": "adaptive"}]


def saves(rank: int, folder: str) -> list[list[int]]:
    told = []
    in_turns()
    for number, more in enumerate(KINDS):
        job, seen = made({"more": more}), Seen()
        train(job, seen, rounds=6)
        assert seen.apart[-1]
        torch.save((job.controller.state_dict(), job.model.state_dict()), f"{folder}/{number}.{rank}")
        job.controller.close()
        told.append(seen.indices)
    return told


def goes_on(rank: int, folder: str) -> list[tuple[list[int], list[float], Tensor]]:
    told = []
    in_turns()
    for number, more in enumerate(KINDS):
        job, seen = made({"more": more}), Seen()
        controller = job.controller
        for part, state in zip((controller, job.model), torch.load(f"{folder}/{number}.0"), strict=True):
            part.load_state_dict(state)
        sizes = int(controller.batch_sizes.sum())
        totals = [controller.base_batch, sizes, sizes / controller.metrics()["steps_apart"]]
        train(job, seen, epochs=1)
        assert len(set(seen.apart)) == 2
        controller.close()
        told.append((seen.indices, totals, seen.weights[-1]))
    return told


@pytest.mark.multiproc
def test_another_world_size_keeps_the_step_over_gradients_and_every_sample(tmp_path: Path) -> None:
    before, after = run_ranks(saves, 2, str(tmp_path)), run_ranks(goes_on, 3, str(tmp_path))
    for number in range(len(KINDS)):
        ranks = [of_rank[number] for of_rank in after]
        assert all(totals[0] == 2 * BATCH and totals[1] >= 3.5 * BATCH for _, totals, _ in ranks)
        assert all(totals[2] == pytest.approx(2 * BATCH, abs=1) for _, totals, _ in ranks)
        assert all(torch.equal(weights, ranks[0][2]) for _, _, weights in ranks)
        seen = [*(of_rank[number] for of_rank in before), *(indices for indices, _, _ in ranks)]
        assert sorted(itertools.chain(*seen)) == [*range(SAMPLES)]


# ---------------------------------------------------------------- what is chosen


def at_cost(rank: int, events: str) -> list[tuple[int, float]]:
    """A link that is slow in the middle of the job; times are given, not measured."""
    job, seen = made({"more": {"events": events}}), Seen()
    controller = job.controller
    decide = AutoSync.decide

    def told_of(window: Window, now: Conditions) -> Window:
        link_s = 0.05 if 4 <= controller.metrics()["windows"] < 6 else 1e-5
        speeds = np.array([1000.0, 500.0])
        compute = np.full(2, window.batch_size.sum() / speeds.sum())  # as if shares fitted the speeds
        seen_s = now.payload * link_s if now.piece else link_s
        times = {"compute": compute, "communication": np.full(2, seen_s), "wait": compute.max() - compute}
        return dataclasses.replace(window, **times)

    def decide_on_told(ways: AutoSync, ask: Ask, window: Window, bounds: Bounds, now: Conditions) -> tuple[Ints, int]:
        return decide(ways, ask, told_of(window, now), bounds, now)

    AutoSync.decide = decide_on_told  # type: ignore[method-assign]
    told = []
    for _ in range(4):
        train(job, seen, epochs=2)
        told.append((len(seen.apart), controller.metrics()["steps_apart"]))
    controller.close()
    return told


@pytest.mark.multiproc
def test_the_way_follows_what_an_exchange_takes(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    ranks = run_ranks(at_cost, 2, str(events))
    assert ranks[0] == ranks[1]
    ways = [event["rounds"]["meet"] for event in decided(events)]
    first, last = ways.index("parameters"), len(ways) - 1 - ways[::-1].index("parameters")
    assert first >= 4
    assert set(ways[first : last + 1]) == {"parameters"}
    assert last < len(ways) - 1
    assert ranks[0][-1][1] == 0
    why = decided(events)[first]["rounds"]["why"]
    assert "parameters after" in why
    assert "50 ms" in why


# ---------------------------------------------------------------- what does not fit


WRONG = {
    "plain": ["needs DDP", "DistributedDataParallel(net)"],
    "static": ["static_graph=True", "leave static_graph out"],
    "loss": ["weighting='loss'", "meet='gradients'"],
}


def _wrong(what: str) -> None:
    controller = dynamix.Controller("lb_bsp", 8, interval=2, meet="auto", process_group=dist.new_group())
    model = net("plain")
    if what == "plain":
        controller.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    options: dict[str, Any] = {"static": {"ddp": {"static_graph": True}}, "loss": {"weighting": "loss"}}.get(what, {})
    job = Training(controller, dataset(), model, **options)
    for _, x, y in job.loader:
        job.train_piece(x, y)


def _refused(rank: int) -> list[str]:
    in_turns()
    return [refusal(UsageError, _wrong, what) for what in WRONG]


@pytest.mark.multiproc
def test_loops_and_models_that_do_not_fit_are_told() -> None:
    for told in run_ranks(_refused, 2):
        for words, said in zip(WRONG.values(), told, strict=True):
            assert all(word in said for word in words), said
