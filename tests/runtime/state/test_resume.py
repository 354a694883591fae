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
from torch import nn
from torch.utils.data import TensorDataset

from tests.ranks import Ok, run_ranks
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script

pytestmark = pytest.mark.multiproc
SAMPLES = 330
DATA = TensorDataset(*classes(SAMPLES, 8).tensors, torch.arange(SAMPLES))
ANSWERS = [[6, 1, 2, 3], [2, 2, 5, 1], [3, 3, 3, 3]]


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


def _run(workers: int, folder: Path, **options: Any) -> list[Any]:
    return run_ranks(_job, workers, str(folder), options, timeout_s=80)


def _assert_every_sample_once(parts: list[dict[int, list[int]]], epochs: int) -> None:
    for epoch in range(epochs):
        together = Counter(i for part in parts for i in part.get(epoch, []))
        assert together == Counter(range(SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_static_repeats_to_the_last_bit_after_a_restart(tmp_path: Path, num_workers: int) -> None:
    whole = _run(4, tmp_path, num_workers=num_workers)
    _run(4, tmp_path, save_at=9, stop_at=9, num_workers=num_workers)
    resumed = _run(4, tmp_path, resume=True, num_workers=num_workers)
    for before, after in zip(whole, resumed, strict=True):
        assert torch.equal(before["weights"], after["weights"])


def test_replayed_allocations_repeat_to_the_last_bit(tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    whole = _run(4, tmp_path, policy=Script(ANSWERS), events=events, lr_rule="adascale")
    assert len({tuple(whole[0]["sizes"])}) == 1
    options = {"policy": Script(ANSWERS), "replay": events, "lr_rule": "adascale"}
    again = _run(4, tmp_path, **options)
    _run(4, tmp_path, save_at=11, stop_at=11, **options)
    resumed = _run(4, tmp_path, resume=True, **options)
    for before, repeated, after in zip(whole, again, resumed, strict=True):
        assert torch.equal(before["weights"], repeated["weights"])
        assert torch.equal(before["weights"], after["weights"])


def test_killed_job_resumes_with_fewer_ranks_with_every_sample_once(tmp_path: Path) -> None:
    options = {"policy": Script(ANSWERS), "save_at": 8, "stop_at": 13, "kill_rank": 2}
    outcomes = run_ranks(_job, 4, str(tmp_path), options, timeout_s=60, group_timeout_s=10, expect_failure=True)
    assert "died" in outcomes[2]
    assert not any(isinstance(o, Ok) or o == "hung" for o in outcomes), outcomes
    before = [eval((tmp_path / f"seen{rank}").read_text()) for rank in range(4)]
    script = Script([[5] * 3, [3] * 3])
    after = _run(3, tmp_path, resume=True, policy=script)
    _assert_every_sample_once(before + [r["seen"] for r in after], 2)
    assert {r["samples"] for r in after} == {2 * SAMPLES}
