"""FSDP2: what a window says of each rank's gradient, of the noise scale, and of computing and waiting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from dynamix.window import Window
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, measured_noise, noise_of
from tests.runtime.sync.sharded_jobs import Blocks, ShardedCase, full
from tests.union import Watching

pytestmark = pytest.mark.multiproc
WINDOWS = 4
SLOW_S = 0.03
SIZES = {2: [9, 3], 4: [9, 3, 6, 2]}


def _windows(rank: int, case: ShardedCase) -> tuple[list[Any], list[Window]]:
    """(S, G2) of each window as each rank's whole gradient says; the windows."""
    sizes = np.array(SIZES[dist.get_world_size()])
    torch.manual_seed(0)
    samples = int(sizes.sum()) * 5 * WINDOWS
    x, y = torch.randn(samples, 6, dtype=case.dtype), torch.randn(samples, 3, dtype=case.dtype)
    model = case.shard(Blocks().to(case.dtype))
    reference = Blocks().to(case.dtype)
    policy = Watching([sizes.tolist()])
    dealt = {"min_batch_size": sizes.tolist(), "max_batch_size": sizes.tolist(), "micro_batch": case.micro_batch}
    controller = adaptive(policy, 6, interval=5, lr_rule="none", min_global_batch=1, **dealt)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=case.clip)
    wrap = {"weighting": case.weighting, "scaler": scaler if case.clip else None}
    job = Training(controller, TensorDataset(x, y), model, lr=1e-3, **wrap)
    true: list[Any] = []
    mine: list[list[torch.Tensor]] = []
    for bx, by in job.loader:
        piece = job.sampler.piece()
        if piece.number == 0:
            with torch.no_grad():
                for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                    p.copy_(full(q))
        mine.append([bx, by])
        with controller.piece():
            loss = F.mse_loss(model(bx), by)
            if rank == 1 and piece.last:
                time.sleep(SLOW_S)
            told = controller.weight(loss) if case.weighting == "loss" else loss
            scaler.scale(told).backward()
        if controller.optimizer_due:
            if controller.metrics()["step"] % 5 == 0:
                own, target = (torch.cat(parts) for parts in zip(*mine, strict=True))
                gradient = torch.autograd.grad(F.mse_loss(reference(own), target), list(reference.parameters()))
                true.append(noise_of(torch.cat([g.flatten() for g in gradient]), sizes))
            mine = []
            scaler.step(job.optimizer)
            scaler.update()
            job.optimizer.zero_grad()
        controller.step(loss=loss)
    controller.close()
    return true, policy.windows


CASES = {
    2: {
        "added, then divided": ShardedCase(force_sum=True),
        "pieces": ShardedCase(micro_batch=3, reshard=True),
        "loss side": ShardedCase(weighting="loss"),
        "scaled": ShardedCase(clip=True),
    },
    4: {"replicas, double": ShardedCase(mesh=(2, 2), dtype=torch.float64)},
}


def _all(rank: int, cases: dict[str, ShardedCase]) -> dict[str, Any]:
    told = {}
    for name, case in cases.items():
        with measured_noise() as found:
            told[name] = found, *_windows(rank, case)
    return told


@pytest.mark.parametrize("workers", [2, 4])
def test_windows_say_what_each_rank_measured(workers: int) -> None:
    for name, (found, true, windows) in run_ranks(_all, workers, CASES[workers], timeout_s=100)[0].items():
        assert len(found) >= WINDOWS - 1, name
        np.testing.assert_allclose(found, true[: len(found)], rtol=1e-3, atol=1e-5, err_msg=name)
        compute, wait = (np.median([getattr(w, field) for w in windows], axis=0) for field in ("compute", "wait"))
        # Others wait for the slow rank: it computes as much longer as they wait, however long both take.
        assert compute[1] > SLOW_S, name
        others = np.delete(np.arange(workers), 1)
        assert (compute[1] - compute[others] > 0.3 * SLOW_S).all(), (name, compute)
        assert (wait[others] - wait[1] > 0.3 * SLOW_S).all(), (name, wait)
        assert all(np.isfinite(w.communication).all() for w in windows), name
