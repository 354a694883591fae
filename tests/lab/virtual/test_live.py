"""Real jobs of several processes, played again on the virtual clock from what they recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dynamix
from dynamix.events.records import read_events
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds
from dynamix_lab.simulator import sample_clusters
from dynamix_lab.virtual.cluster import VirtualCluster
from tests.lab.virtual.small import SAME, assert_same_windows, dataset, made, nesterov, trained, weights
from tests.ranks import run_ranks
from tests.runtime.jobs import decided, in_turns
from tests.union import Script

INTERVAL = 3
SHARES = [[40, 24], [12, 52], [0, 64], [32, 32], [54, 10]]
GROWING = [[40, 24], [40, 40], [60, 30], [50, 20], [20, 60]]
ZERO_SHARES = [[0, 12, 10, 10], [6, 2, 20, 4], [8, 8, 8, 8], [3, 0, 30, 5]]


@dataclass(frozen=True)
class Case:
    """A job of two ranks that step apart, or of four ranks that meet over gradients."""

    policy: Any
    meet: str = "parameters"
    rounds: str = "fixed"
    norm: bool = False
    adam: bool = False
    how: Mapping[str, Any] = field(default_factory=dict)  # arguments of Averaging
    low: int = 0
    high: int = 64
    share: int = 32
    samples: int = 1000
    epochs: int = 2

    @property
    def options(self) -> dict[str, Any]:
        """What a controller and the virtual clock call by the same names."""
        rule = {"lr_rule": "adascale"} if self.meet == "gradients" else {}
        return {"meet": self.meet, "interval": INTERVAL, **rule}


FOUR: dict[str, Any] = {"meet": "gradients", "rounds": "adaptive", "high": 40, "share": 8, "samples": 350, "epochs": 4}
CASES = {
    "shares": Case("lb_bsp", samples=600),
    "rounds": Case("lb_bsp", rounds="adaptive", high=96, samples=600),
    "batchnorm-adam": Case(Script(SHARES), norm=True, adam=True),
    "outer-kept": Case(Script(SHARES), how={"outer": nesterov, "optimizer_state": "kept"}),
    "reset-bfloat16": Case(Script(SHARES), how={"optimizer_state": "reset", "wire": "bfloat16"}),
    "auto": Case(Script(SHARES), meet="auto", norm=True, adam=True),
    "auto-grows": Case(Script(GROWING), meet="auto", rounds="adaptive", high=96, how={"optimizer_state": "kept"}),
    "gradients": Case("lb_bsp", low=1, **FOUR),
    "gradients-zero-shares-batchnorm": Case(Script(ZERO_SHARES), norm=True, **FOUR),
}


def workers_of(case: Case) -> int:
    return 4 if case.meet == "gradients" else 2


def schedule_for(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=1.0 if case.meet == "gradients" else 0.9)


def live(rank: int, case: Case, events: str) -> dict[str, Any]:
    """The loop of docs/rounds.md; later ranks are slower, and who is slow changes with the epoch."""
    net, optimizer = made(norm=case.norm, adam=case.adam)
    pieces = {"micro_batch": 8} if case.meet == "parameters" else {}
    sizes = {"min_batch_size": case.low, "max_batch_size": case.high, "global_batch": case.rounds, **pieces}
    controller = dynamix.Controller(case.policy, case.share, events=events, **sizes, **case.options)
    data, workers = dataset(case.samples), workers_of(case)
    sampler = controller.batch_sampler(data, seed=4)
    ours: nn.Module = net if case.meet == "parameters" else DistributedDataParallel(net, bucket_cap_mb=1e-4)
    model = controller.wrap(ours, optimizer, averaging=None if workers == 4 else Averaging(**case.how))
    controller.scheduler(schedule_for(case, optimizer))
    losses, counts = [0.0], []
    for epoch in range(case.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_sampler=sampler):
            piece = sampler.piece()
            with contextlib.nullcontext() if workers == 4 else controller.piece():
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                loss.backward()
            if case.policy == "lb_bsp":
                time.sleep(0.0002 * piece.samples * 2 ** ((rank + epoch) % workers))
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss, logits=logits, target=y)
            losses[-1] += loss.item() * piece.samples
            if workers == 4 or controller.met:
                counts.append(piece.plan.counts.tolist())
                losses.append(0.0)
    controller.close()
    return {"losses": losses[:-1], "counts": counts, "weights": weights(net), "parameters": trained(net)}


def _all(rank: int, workers: int, folder: Path) -> dict[str, dict[str, Any]]:
    in_turns()
    mine = {name: case for name, case in CASES.items() if workers_of(case) == workers}
    return {name: live(rank, case, str(folder / name)) for name, case in mine.items()}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Where the jobs' events are, and what each rank of each job found."""
    folder, found = tmp_path_factory.mktemp("jobs"), dict[str, list[dict[str, Any]]]()
    for workers in (2, 4):
        ranks = run_ranks(_all, workers, workers, folder, timeout_s=200)
        found |= {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}
    return folder, found


def played(case: Case, recorded: Path, events: Path) -> VirtualCluster:
    net, optimizer = made(norm=case.norm, adam=case.adam)
    workers = workers_of(case)
    how: dict[str, Any] = {"batch_size": case.share, "bounds": Bounds.of(workers, case.low, case.high), "seed": 4}
    if workers == 4:
        how["micro_batch"] = 5
    else:
        how |= {"rounds": case.rounds, "averaging": Averaging(**case.how), "micro_batch": 8}
    files = {"policy": case.policy, "replay": recorded, "events": events}
    clusters = sample_clusters(1, workers, seed=3)
    data = dataset(case.samples)
    cluster = VirtualCluster(net, optimizer, F.cross_entropy, data, clusters=clusters, **how, **files, **case.options)
    cluster.scheduler(schedule_for(case, optimizer))
    return cluster


@pytest.mark.multiproc
@pytest.mark.parametrize("name", CASES)
def test_the_virtual_clock_equals_a_real_job(
    jobs: tuple[Path, dict[str, list[dict[str, Any]]]], tmp_path: Path, name: str
) -> None:
    case, recorded, events, ranks = CASES[name], jobs[0] / name, tmp_path / "virtual.jsonl", jobs[1][name]
    counts = np.array(ranks[0]["counts"])
    losses = np.array([of_rank["losses"] for of_rank in ranks]).sum(0) / counts.sum(1)
    assert len({tuple(of_round) for of_round in counts.tolist()}) >= 3
    assert counts.sum() == case.epochs * case.samples
    if case.meet == "auto":
        apart = {event.get("piece", 0) for event in read_events(recorded)}
        assert len(apart) > (2 if case.rounds == "adaptive" else 1)

    exact = 1e-3 if "wire" in case.how else 1e-9
    with played(case, recorded, events) as cluster:
        run = cluster.run(len(losses))
        np.testing.assert_array_equal(run.counts, counts)
        np.testing.assert_allclose(run.loss, losses, rtol=exact)
        # With "auto" each rank begins a round apart with buffers of its own.
        mine: Tensor = (trained if case.meet == "auto" else weights)(cluster.model)
        theirs = ranks[0]["parameters" if case.meet == "auto" else "weights"]
        torch.testing.assert_close(mine, theirs, rtol=exact, atol=exact)
    one, other = decided(recorded), decided(events)
    assert len(one) == len(other) > 2
    names = (*SAME, "gradient_norm_sq") if case.meet == "gradients" else SAME
    assert_same_windows(one, other, names, rtol=max(exact, 1e-6))
    # By lb_bsp it is measured only in rounds in which both workers have pieces to compare.
    assert case.policy == "lb_bsp" or other[-1]["window"]["noise"] is not None
