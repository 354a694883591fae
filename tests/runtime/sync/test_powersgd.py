"""PowerSGD at a low rank over many buckets: torch's own aborts or hangs there on gloo (two collectives a bucket)."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import TensorDataset

import dynamix
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive
from tests.union import Deep, Script

STEPS = 120
SHARES = [[2, 8, 5], [7, 3, 2]]


def _train(rank: int) -> dict[str, Any]:
    torch.manual_seed(3)
    x = torch.randn(400, 6)
    y = Deep(depth=2)(x).detach()
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=1
    )
    used: dict[int, list[str]] = {}

    def spy(state: Any, bucket: Any) -> Any:
        used.setdefault(bucket.index(), []).append(state.process_group.group_name)
        return powerSGD_hook.powerSGD_hook(state, bucket)

    controller = adaptive(Script(SHARES), 4, max_batch_size=16, interval=5)
    hook = {"hook": spy, "hook_state": state, "ddp": {"bucket_cap_mb": 1e-4}}
    job = Training(controller, TensorDataset(x, y), Deep(), lr=0.02, **hook)
    losses: list[float] = []
    for bx, by in itertools.islice(job.batches(STEPS), STEPS):
        loss = F.mse_loss(job.model(bx), by)
        loss.backward()
        job.finish(loss=loss)
        losses.append(float(loss.detach()))
    controller.close()
    return {"weights": job.weights(), "losses": losses, "used": used}


@pytest.mark.multiproc
def test_ranks_stay_equal_and_the_loss_falls_with_a_process_group_per_bucket() -> None:
    results = run_ranks(_train, 3, timeout_s=100)
    for result in results:
        assert torch.equal(result["weights"], results[0]["weights"])
        assert torch.isfinite(result["weights"]).all()
        used = result["used"]
        assert len(used) >= 8
        assert all(len(set(names)) == 1 for names in used.values())
        assert len({names[0] for names in used.values()}) == len(used)
        assert all(len(names) > 0.9 * STEPS for names in used.values()), "the hook hardly ever ran"
    mean = np.mean([result["losses"] for result in results], axis=0)
    assert mean[-20:].mean() < 0.5 * mean[:20].mean()


def _rolled_back(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(400, 6))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    controller = dynamix.Controller("static", batch_size=4, global_batch="adaptive")
    job = Training(controller, data, Deep(depth=3), lr=0.02, hook=powerSGD_hook.powerSGD_hook, hook_state=state)
    saved: list[Any] = []
    ends: list[torch.Tensor] = []
    for _ in range(3):
        if saved:
            controller.load_state_dict(saved[0])
            job.net.load_state_dict(saved[1])
        for steps, (bx,) in enumerate(itertools.islice(job.loader, 10 if ends else 20), 1):
            job.model(bx).square().mean().backward()
            job.finish()
            if steps == 10 and not saved:
                saved += [controller.state_dict(), copy.deepcopy(job.net.state_dict())]
        ends.append(job.weights().clone())
    controller.close()
    return ends


@pytest.mark.multiproc
def test_a_state_kept_in_memory_is_not_changed_by_what_is_trained_after_it() -> None:
    for first, second, third in run_ranks(_rolled_back, 2):
        assert torch.equal(first, second)
        assert torch.equal(first, third)
