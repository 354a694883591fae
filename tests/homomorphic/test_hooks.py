"""Registered in one line, alone or inside the controller, on real gloo ranks with many buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.compression import CompressionState, compression_hook
from tests.homomorphic.beside import Net, beside_fixed, trained, words_of
from tests.ranks import run_ranks


def _train(rank: int, mode: str, steps: int) -> dict[str, Any]:
    """Trains with `mode` and at every third step reduces every bucket in dense fixed point as well."""
    torch.manual_seed(0)
    net = Net(layers=8)
    model = DDP(net, bucket_cap_mb=0.001)
    state = CompressionState(mode, model=net)  # type: ignore[arg-type]
    equal: list[bool] = []
    losses: list[float] = []
    model.register_comm_hook(None, beside_fixed(net, state, equal, due=lambda: len(losses) % 3 == 0))
    for loss in trained(net, model, rank, steps):
        losses.append(loss)  # the hook counts them meanwhile
    return {"losses": losses, "equal": equal, "buckets": len(state.ways), "statistics": state.statistics.as_dict()}


def _inside_the_controller(rank: int, mode: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net(layers=8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    controller = dynamix.Controller("static", batch_size=4, interval=5, global_batch="adaptive")
    data = TensorDataset(torch.cat([words_of(0, step) for step in range(36)]))
    loader = DataLoader(data, batch_sampler=controller.batch_sampler(data))
    state = CompressionState(mode, model=net) if mode != "plain" else None  # type: ignore[arg-type]
    hook = compression_hook if state else allreduce_hook
    model = controller.wrap(DDP(net, bucket_cap_mb=0.001), optimizer, hook=hook, hook_state=state)
    for step, (words,) in enumerate(loader):
        loss = model(words).square().mean()
        if step == 7 and rank == 1:
            loss = loss * float("inf")
        loss.backward()
        finite = all(bool(torch.isfinite(p.grad).all()) for p in net.parameters() if p.grad is not None)
        if finite:
            optimizer.step()
        assert finite == (step != 7), "every rank sees the infinity, as a GradScaler must"
        optimizer.zero_grad()
        controller.step(loss=loss)
    controller.close()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {"weights": weights, "statistics": state.statistics.as_dict() if state else {}}


MODES = ("lhc", "compaction", "lhc-one-phase")
STEPS = 30


def _in_turn(rank: int) -> dict[str, dict[str, Any]]:
    found = {f"alone, {mode}": _train(rank, mode, STEPS) for mode in MODES}
    return found | {mode: _inside_the_controller(rank, mode) for mode in ("plain", "compaction", "lhc", "gather")}


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(240)  # thousands of small collectives: minutes only where other jobs hold the cores
def test_every_bucket_equals_dense_fixed_point_bit_for_bit_alone_and_inside_the_controller() -> None:
    results = run_ranks(_in_turn, 3, timeout_s=220)
    for mode in MODES:
        for result in (of_rank[f"alone, {mode}"] for of_rank in results):
            assert result["buckets"] >= 8
            assert len(result["equal"]) > 8 * (STEPS // 3 - 1)
            counted = result["statistics"]
            assert counted == results[0][f"alone, {mode}"]["statistics"]
            assert all(result["equal"])
            assert not counted["dense_after"]
            assert counted["undecoded"] <= (0.01 * counted["buckets"][mode] if mode == "lhc-one-phase" else 0)
            assert result["losses"][-1] < 0.5 * result["losses"][0]
    one, *others = results
    for mode in ("compaction", "lhc", "gather"):
        assert all(torch.equal(one[mode]["weights"], other[mode]["weights"]) for other in others)
        assert (one[mode]["weights"] - one["plain"]["weights"]).abs().max() < 1e-6
        assert one[mode]["statistics"]["buckets"][mode] > (30 if mode != "gather" else 10), "layers go dense"
