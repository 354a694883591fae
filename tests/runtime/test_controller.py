"""What a training loop relies on besides weighting: bounds, errors, streams, schedules, single process, buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import IterableDataset

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.state.packing import checksum, pack
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, classifier, decided, order_of
from tests.union import Script


def test_batch_above_the_data_set() -> None:
    controller = dynamix.Controller("static", batch_size=300, global_batch="adaptive")
    with pytest.raises(ConfigError, match="240"):
        controller.batch_sampler(classes(240))


def test_calls_out_of_order_say_what_to_do() -> None:
    controller = dynamix.Controller("static", batch_size=8, global_batch="adaptive")
    with pytest.raises(UsageError, match="batch_sampler"):
        controller.step()
    controller.batch_sampler(classes(240))
    with pytest.raises(UsageError, match="one Controller per loop"):
        controller.batch_sampler(classes(240))


def _loop(job: Training, epochs: int = 1) -> list[int]:
    """Trains, and tells all that can be told; the sizes of the batches."""
    seen = []
    for _ in range(epochs):
        for x, y in job.loader:
            logits = job.model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            job.finish(loss=loss, logits=logits, target=y)
            seen.append(len(x))
    job.controller.close()
    return seen


def test_single_process_adapts_the_batch_and_leaves_the_learning_rate(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    controller = adaptive(Script([[32], [16], [64]]), interval=4, lr_rule="sqrt", events=events)
    job = Training(controller, classes(240))
    seen = _loop(job, 3)
    assert set(seen) >= {8, 16, 32, 64}
    assert sum(seen) == 3 * 240 == controller.samples_seen
    assert job.optimizer.param_groups[0]["lr"] == 0.1
    windows = [dynamix.Window.from_dict(event["window"]) for event in decided(events)]
    assert all(w.compute[0] > 0 and w.steps == 4 for w in windows)
    assert any(w.noise > 0 for w in windows), "one worker measures the noise scale from consecutive gradients"


class _Talkative(Script):
    """Fails in all that follows a decision."""

    def report(self) -> dict[str, Any]:
        raise RuntimeError("nothing to report")


def test_what_fails_after_a_decision_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    controller = dynamix.Controller(_Talkative([[8]]), 8, interval=4, events=tmp_path / "events.jsonl")
    assert sum(_loop(Training(controller, classes(240)))) == 240
    assert "recording a decision has failed" in caplog.text


class Count(IterableDataset[Any]):
    def __init__(self, start: int, stop: int) -> None:
        self.range = range(start, stop)

    def __iter__(self) -> Any:
        return ((torch.full((6,), float(i)), torch.tensor(i % 3)) for i in self.range)


def _stream(rank: int, sharded: bool) -> dict[str, Any]:
    spans = [(0, 50), (50, 81), (81, 200)]
    data = Count(*spans[rank]) if sharded else Count(0, 200)
    net = classifier()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    controller = adaptive(Script([[2, 9, 4], [5, 3, 3]]), 4, max_batch_size=16)
    stream = controller.stream(data, sharded=sharded)
    model = controller.wrap(DDP(net), optimizer)
    seen, steps = [], 0
    for x, y in stream:
        mine = int(stream.plan().counts[rank])
        seen += x[:mine, 0].int().tolist() if mine else []
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        steps += 1
    controller.close()
    return {"seen": seen, "steps": steps, "weights": net.weight.detach().clone()}


def _streams(rank: int) -> list[dict[str, Any]]:
    return [_stream(rank, sharded) for sharded in (False, True)]


@pytest.mark.multiproc
def test_streams_deal_every_sample_once_in_equal_steps() -> None:
    for results in zip(*run_ranks(_streams, 3), strict=True):
        assert sorted(i for r in results for i in r["seen"]) == list(range(200))
        assert len({r["steps"] for r in results}) == 1
        assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)


def _batch_norm(rank: int, mode: str) -> list[float]:
    """How far the buffers that a forward starts from are from the union batch's mean, step by step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(6, momentum=1.0, affine=False), nn.Linear(6, 3))
    job = Training(adaptive(Script([[2, 14]])), classes(240), net, batchnorm=mode)
    job.controller.warm_up(lambda: job.model(torch.zeros(2, 6)).sum().backward())
    before, errors = [], []
    net[0].register_forward_pre_hook(lambda module, args: before.append(module.running_mean.clone()))
    union, order = None, order_of(240)
    for x, y in job.loader:
        plan = job.sampler.plan()
        job.backward(x, y)
        if union is not None:  # momentum 1: each rank's running mean was its own last batch's
            errors.append(float((before[-1] - union).abs().max()))
        union = classes(240).tensors[0][order[plan.start : plan.start + int(plan.counts.sum())]].mean(0)
        job.finish()
    job.model.eval()
    with torch.no_grad():
        assert torch.isfinite(job.model(classes(240).tensors[0][:5])).all()
    job.controller.close()
    return errors


def _both_batch_norms(rank: int) -> list[list[float]]:
    return [_batch_norm(rank, mode) for mode in ("weighted", "rank0")]


@pytest.mark.multiproc
def test_weighted_batch_norm_buffers_are_the_union_batchs_after_warm_up_and_in_evaluation() -> None:
    for weighted, of_rank_0 in run_ranks(_both_batch_norms, 2):
        assert max(weighted) < 1e-6
        assert max(of_rank_0) > 0.1, "rank 0's own statistics should differ, or this test shows nothing"


def _after_a_decision(policy: Any) -> dict[str, Any]:
    job = Training(adaptive(policy), classes(240))
    for x, y in job.loader:
        job.backward(x, y)
        job.finish()
    return job.controller.state_dict()


@pytest.mark.parametrize("workers_before", [1, 2])
def test_a_state_is_loaded_before_anything_else_is_made(workers_before: int) -> None:
    state = _after_a_decision(Script([[12], *[[10]] * 50]))
    assert state["ledger_rounds"][0] > 0
    if workers_before == 2:
        state |= {"world_size": 2, "hosts": pack({"names": [], "shares": {}})}
        state["ledger_sizes"] = [[*sizes, *sizes] for sizes in state["ledger_sizes"]]
        state["source"] = {**state["source"], "taken": [*state["source"]["taken"], 0]}
        state["checksum"] = checksum(state)
    net, controller = classifier(), adaptive(Script([]))
    controller.load_state_dict(state)
    assert controller.batch_sizes.tolist() == [10 * workers_before]
    controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert len(next(iter(controller.batch_sampler(classes(240))))) == 10 * workers_before
