"""meet="auto": rounds over gradients and rounds apart in one job, and from one to the other and back."""

from __future__ import annotations

import copy
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
from dynamix.errors import ConfigError, UsageError
from dynamix.model.auto_sync import AutoSync
from dynamix.model.sync_schedule import Ask, Conditions
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds, Ints, Window
from tests.ranks import refusal, run_ranks
from tests.runtime.jobs import Training, decided, furthest, in_turns, order_of, wait_for_decisions
from tests.runtime.sync.test_apart import net
from tests.runtime.sync.test_apart_loops import nesterov
from tests.union import Script, larger

SHARES = {2: [[10, 6], [5, 11], [14, 2]], 3: [[10, 6, 8], [4, 15, 5]]}
GROWING = {
    2: [[10, 6], [16, 12], [24, 10], [8, 6]],
    3: [[10, 6, 8], [9, 9, 9]],
    4: [[10, 6, 8, 8], [16, 12, 12, 6], [9, 9, 9, 9]],
}
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
    x, y = dataset().tensors[1:]
    for _ in range(epochs):
        for index, inputs, target in job.loader:
            piece = job.sampler.piece()
            with controller.piece():
                loss = job.backward(inputs, target)
            assert controller.optimizer_due
            if not piece.round.apart and not any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
                reference = copy.deepcopy(job.net)
                reference.zero_grad()
                union = order_of(SAMPLES, 1, piece.round.epoch)[
                    piece.plan.start : piece.plan.start + piece.round.samples
                ]
                F.cross_entropy(reference(x[union]), y[union]).backward()
                seen.worst = larger(seen.worst, furthest(model, [p.grad for p in reference.parameters()]))
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


def whole(rank: int, case: dict[str, Any]) -> Seen:
    job, seen = made(case), Seen()
    in_turns()
    train(job, seen, rank=rank)
    job.controller.close()
    return seen


CASES: list[dict[str, Any]] = [
    {},
    {"kind": "batchnorm", "adam": True},
    {"how": {"optimizer_state": "kept"}, "num_workers": 2},
    {"how": {"optimizer_state": "reset"}, "more": {"lr_rule": "none"}},
    {"how": {"outer": nesterov}},
    {"more": {"global_batch": "adaptive", "lr_rule": "linear"}},
]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("workers", "case"),
    [(2, CASES[0]), (3, CASES[1]), (2, CASES[2]), (2, CASES[3]), (2, CASES[4]), (4, CASES[5])],
    ids=["plain", "batchnorm-adam", "kept", "reset", "outer", "grows"],
)
def test_a_job_goes_over_to_the_other_way_and_back(workers: int, case: dict[str, Any]) -> None:
    ranks = run_ranks(whole, workers, case)
    ways = ranks[0].apart
    changes = sum(one != other for one, other in itertools.pairwise(ways))
    assert not ways[0]
    assert changes >= 3
    assert len(set(ranks[0].pieces)) >= (3 if case.get("more", {}).get("global_batch") else 2)
    for seen in ranks:
        assert seen.apart == ways
        assert seen.worst < 1e-12
        if case.get("more", {}).get("lr_rule") != "none" and not case.get("adam"):
            assert all(factor == pytest.approx(wanted) for factor, wanted in seen.factors)
        for own, first in zip(seen.weights, ranks[0].weights, strict=True):
            buffers = case.get("kind") == "batchnorm"  # over gradients they are each rank's own, as under DDP
            assert buffers or torch.equal(own, first)
    if case.get("kind") == "batchnorm":
        apart = [number for number, way in enumerate(ways) if way]
        assert all(torch.equal(seen.weights[n], ranks[0].weights[n]) for seen in ranks for n in apart)
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


def resumed(rank: int, folder: str, stop: int, more: dict[str, Any]) -> tuple[Seen, Seen]:
    def begun(saved: Any = None) -> Training:
        job = made({"adam": True, "more": more})
        if saved is not None:
            for part, state in zip((job.controller, job.model, job.optimizer), saved, strict=True):
                part.load_state_dict(state)
        in_turns()
        return job

    straight, again, job = Seen(), Seen(), begun()
    train(job, straight)
    job.controller.close()
    job, stop = begun(), stop or next(number for number, piece in enumerate(straight.pieces, 1) if piece > BATCH)
    train(job, again, rounds=stop)
    assert again.pieces == straight.pieces[:stop]
    saved = [part.state_dict() for part in (job.controller, job.model, job.optimizer)]
    job.controller.close()
    job = begun(saved)
    train(job, again, epochs=1)
    train(job, again, epochs=1 if len(again.indices) < len(straight.indices) else 0)
    job.controller.close()
    return straight, again


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("stop", "apart", "moves"),
    [(2, False, False), (6, True, False), (0, True, True)],
    ids=["over-gradients", "apart", "apart-grown"],
)
def test_a_saved_job_goes_on_in_its_way(tmp_path: Path, stop: int, apart: bool, moves: bool) -> None:
    more = {"global_batch": "adaptive"} if moves else {}
    for straight, again in run_ranks(resumed, 2, str(tmp_path), stop, more):
        assert again.pieces == straight.pieces
        assert straight.apart[stop - 1] == apart or not stop
        assert again.indices == straight.indices
        torch.testing.assert_close(again.weights[-1], straight.weights[-1], rtol=0, atol=1e-12)


def saves(rank: int, folder: str, more: dict[str, Any]) -> list[int]:
    job, seen = made({"more": more}), Seen()
    in_turns()
    train(job, seen, rounds=6)
    assert seen.apart[-1]
    torch.save((job.controller.state_dict(), job.model.state_dict()), f"{folder}/state{rank}")
    job.controller.close()
    return seen.indices


def goes_on(rank: int, folder: str, more: dict[str, Any]) -> tuple[list[int], list[int], Tensor]:
    job, seen = made({"more": more}), Seen()
    controller = job.controller
    for part, state in zip((controller, job.model), torch.load(f"{folder}/state0"), strict=True):
        part.load_state_dict(state)
    in_turns()
    sizes = int(controller.batch_sizes.sum())
    totals = [controller.base_batch, sizes, sizes / controller.metrics()["steps_apart"]]
    train(job, seen, epochs=1)
    assert len(set(seen.apart)) == 2
    controller.close()
    return seen.indices, totals, seen.weights[-1]


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_another_world_size_keeps_the_step_over_gradients_and_every_sample(tmp_path: Path, kind: str) -> None:
    more = {"global_batch": "adaptive"} if kind == "adaptive" else {}
    before = [i for of_rank in run_ranks(saves, 2, str(tmp_path), more) for i in of_rank]
    ranks = run_ranks(goes_on, 3, str(tmp_path), more)
    assert all(totals[0] == 2 * BATCH and totals[1] >= 3.5 * BATCH for _, totals, _ in ranks)
    assert all(totals[2] == pytest.approx(2 * BATCH, abs=1) for _, totals, _ in ranks)
    assert all(torch.equal(weights, ranks[0][2]) for _, _, weights in ranks)
    assert sorted([*before, *(i for of_rank in ranks for i in of_rank[0])]) == [*range(SAMPLES)]


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"meet": "sometimes"}, ["meet='sometimes'", "'auto'"]),
        ({"micro_batch": 4}, ["micro_batch=4", "leave micro_batch out"]),
        ({"accumulate": 2}, ["accumulate=2", "leave accumulate out"]),
        ({"policy": "stigmergic"}, ["meet='auto'", "goodput"]),
    ],
)
def test_settings_that_do_not_fit_are_named(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        dynamix.Controller(**{"policy": "lb_bsp", "batch_size": 8, "meet": "auto", **given})
    for word in words:
        assert word in str(caught.value)


def _wrong(what: str) -> None:
    controller = dynamix.Controller("lb_bsp", 8, interval=2, meet="auto")
    model = net("plain")
    if what == "plain":
        controller.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    options: dict[str, Any] = {"static": {"ddp": {"static_graph": True}}, "loss": {"weighting": "loss"}}.get(what, {})
    job = Training(controller, dataset(), model, **options)
    in_turns()
    for _, x, y in job.loader:
        job.train_piece(x, y)
        if what == "saved between" and not controller.met:
            controller.state_dict()


def _refused(rank: int, what: str) -> str:
    return refusal(UsageError, _wrong, what)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plain", ["needs DDP", "DistributedDataParallel(net)"]),
        ("static", ["static_graph=True", "leave static_graph out"]),
        ("loss", ["weighting='loss'", "meet='gradients'"]),
        ("saved between", ["differ between two meetings", "controller.met"]),
    ],
    ids=lambda of: of if isinstance(of, str) else "",
)
def test_loops_and_models_that_do_not_fit_are_told(what: str, words: list[str]) -> None:
    for told in run_ranks(_refused, 2, what):
        for word in words:
            assert word in told
