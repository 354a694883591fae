"""A killed job goes on at the same sample, also at another world size; weights repeat to the last bit."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks import Ok, run_ranks
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script

pytestmark = pytest.mark.multiproc
SAMPLES = 330
DATA = TensorDataset(*classes(SAMPLES, 8).tensors, torch.arange(SAMPLES))
ANSWERS = [[6, 1, 2], [2, 2, 5], [3, 3, 3]]


def job(
    rank: int,
    folder: str,
    *,
    policy: Any = "static",
    epochs: int = 2,
    save_at: int | None = None,
    stop_at: int | None = None,
    kill_rank: int | None = None,
    resume: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Trains with dropout; returns indices seen per epoch by this rank and the final weights."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    controller = adaptive(policy, 4, **{"max_batch_size": 16, "interval": 3, "lr_rule": "none", **options})
    made = {"optimizer": optimizer, "sampling": {"seed": 2}, "ddp": {"bucket_cap_mb": 1e-3}, "num_workers": num_workers}
    steps = Training(controller, DATA, net, **made)
    path = Path(folder) / f"rank{rank}.pt"
    first = 0
    torch.manual_seed(100 + rank)
    if resume:
        saved = torch.load(path if path.exists() else Path(folder) / "rank0.pt", weights_only=False)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        controller.load_state_dict(saved["controller"])
        first = saved["epoch"]
        controller.warm_up(lambda: steps.model(torch.zeros(2, 8)).sum().backward())
    seen: dict[int, list[int]] = {}
    done = 0
    for epoch in range(first, epochs):
        steps.sampler.set_epoch(epoch)
        for x, y, index in steps.loader:
            mine = steps.sampler.plan().counts[rank]
            logits = steps.model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            steps.finish(loss=loss, logits=logits, target=y)
            seen.setdefault(epoch, []).extend(index.tolist() if mine else [])
            done += 1
            if done == save_at:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save({**state, "controller": controller.state_dict()}, path)
                (Path(folder) / f"seen{rank}").write_text(repr(seen))
                dist.barrier()
            if done == stop_at:
                if kill_rank is not None and rank == kill_rank:
                    os.kill(os.getpid(), signal.SIGKILL)
                if kill_rank is None:
                    controller.close()
                    return {"seen": seen}
    controller.close()
    sizes = controller.batch_sizes
    return {"seen": seen, "weights": steps.weights(), "samples": controller.samples_seen, "sizes": sizes}


def _job(rank: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return job(rank, folder, **options)


def _repeated(rank: int, folder: str) -> dict[str, list[Tensor]]:
    """By case the weights of a whole job, of one that stopped and went on, and of one more from the beginning."""
    told: dict[str, list[Tensor]] = {}
    replayed = {"policy": Script(ANSWERS), "replay": f"{folder}/events.jsonl", "lr_rule": "adascale"}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "static": ({"num_workers": 2}, {"num_workers": 2}),
        "replayed": ({"policy": Script(ANSWERS), "events": replayed["replay"], "lr_rule": "adascale"}, replayed),
    }
    for name, (first, later) in cases.items():
        stopping = {"save_at": 9 + 2 * len(told), "stop_at": 9 + 2 * len(told)}
        ways = (first, {**later, **stopping}, {**later, "resume": True}, later)
        jobs = []
        for options in ways:
            jobs.append(job(rank, folder, **options))
            dist.barrier()  # what was recorded is written
        told[name] = [one["weights"] for one in jobs if "weights" in one]
    return told


def test_weights_repeat_to_the_last_bit_in_another_run_and_after_a_restart(tmp_path: Path) -> None:
    for told in run_ranks(_repeated, 3, str(tmp_path), timeout_s=100):
        for name, (whole, resumed, again) in told.items():
            assert torch.equal(whole, resumed), name
            assert torch.equal(whole, again), name


def test_a_killed_job_resumes_with_fewer_ranks_with_every_sample_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": Script(ANSWERS), "save_at": 8, "stop_at": 13, "kill_rank": 1}
    outcomes = run_ranks(_job, 3, str(tmp_path), options, timeout_s=60, group_timeout_s=10, expect_failure=True)
    assert "died" in outcomes[1]
    assert not any(isinstance(o, Ok) or o.startswith("hung") for o in outcomes), outcomes
    before = [eval((tmp_path / f"seen{rank}").read_text()) for rank in range(3)]
    after = run_ranks(_job, 2, str(tmp_path), {"resume": True, "policy": Script([[5] * 2, [3] * 2])})
    for epoch in range(2):
        together = Counter(i for part in before + [r["seen"] for r in after] for i in part.get(epoch, []))
        assert together == Counter(range(SAMPLES))
    assert {r["samples"] for r in after} == {2 * SAMPLES}
