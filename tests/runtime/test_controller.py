"""What a training loop relies on besides weighting: bounds, errors, streams, schedules, single process, buffers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import IterableDataset, TensorDataset

import dynamix
from dynamix.errors import ConfigError, PolicyFileError, UsageError
from dynamix.runtime.state.packing import checksum, pack
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, classifier, decided, order_of
from tests.union import Script


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"policy": "nonsense"}, ["policy='nonsense'", "dbs, dynamix, dynamix-paper, goodput, lb_bsp"]),
        ({"batch_size": 0}, ["batch_size=0", "1 or more"]),
        ({"batch_size": 2.5}, ["batch_size=2.5"]),
        ({"min_batch_size": 64, "max_batch_size": 32}, ["max_batch_size=32", "at least min_batch_size=64"]),
        ({"batch_size": 128, "max_batch_size": 64}, ["batch_size=128", "1 to 64"]),
        ({"batch_size": 100, "quantum": 32}, ["batch_size=100", "steps of 32"]),
        ({"max_batch_size": [8, 8]}, ["max_batch_size=[8, 8]", "a list of 1"]),
        ({"interval": 0}, ["interval=0"]),
        ({"lr_rule": "cubic"}, ["lr_rule", "adascale", "cubic"]),
        ({"policy": object()}, ["decide, state_dict, load_state_dict"]),
    ],
)
def test_bad_arguments_name_value_range_and_fix(arguments: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        dynamix.Controller(**{"policy": "static", "batch_size": 128, "global_batch": "adaptive", **arguments})
    for name in names:
        assert name in str(caught.value)


def test_corrupted_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"not a policy")
    with pytest.raises(PolicyFileError):
        dynamix.Controller(str(path), 8, global_batch="adaptive")


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


def test_default_policy_runs_in_a_single_process() -> None:
    controller = dynamix.Controller(batch_size=8, interval=2, global_batch="adaptive")
    assert sum(_loop(Training(controller, classes(240)), 2)) == 480


class _Talkative(Script):
    """Fails in all that follows a decision."""

    def report(self) -> dict[str, Any]:
        raise RuntimeError("nothing to report")


def test_what_fails_after_a_decision_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    controller = dynamix.Controller(_Talkative([[8]]), 8, interval=4, events=tmp_path / "events.jsonl")
    assert sum(_loop(Training(controller, classes(240)))) == 240
    assert "what follows a decision has failed" in caplog.text


def test_schedule_by_samples_never_runs_past_its_end() -> None:
    job = Training(adaptive(Script([[32], [8]])), classes(240))
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.1, total_steps=20)
    schedule = job.controller.scheduler(one_cycle, nominal_batch_size=24)
    _loop(job, 3)
    assert schedule.samples == 720
    assert one_cycle.last_epoch == 19


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


@pytest.mark.multiproc
@pytest.mark.parametrize("sharded", [False, True])
def test_streams_deal_every_sample_once_in_equal_steps(sharded: bool) -> None:
    results = run_ranks(_stream, 3, sharded)
    assert sorted(i for r in results for i in r["seen"]) == list(range(200))
    assert len({r["steps"] for r in results}) == 1
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)


def _batch_norm(rank: int, mode: str) -> list[float]:
    """How far the buffers that a forward starts from are from the union batch's mean, step by step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(6, momentum=1.0, affine=False), nn.Linear(6, 3))
    job = Training(adaptive(Script([[2, 14]])), classes(240), net, batchnorm=mode)
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
    job.controller.close()
    return errors


@pytest.mark.multiproc
def test_weighted_batch_norm_buffers_are_the_union_batchs() -> None:
    for errors in run_ranks(_batch_norm, 2, "weighted"):
        assert max(errors) < 1e-6
    for errors in run_ranks(_batch_norm, 2, "rank0"):
        assert max(errors) > 0.1, "rank 0's own statistics should differ, or this test shows nothing"


def _averaging(rank: int) -> float:
    """Model averaging every H steps: no DDP, so no gradient crosses ranks."""
    net = classifier()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = classes(240).tensors
    since = 0
    for step in range(12):
        n = [3, 9][rank]
        start = (step * 12 + 3 * rank) % 200
        F.cross_entropy(net(x[start : start + n]), y[start : start + n]).backward()
        optimizer.step()
        optimizer.zero_grad()
        since += n
        if step % 4 == 3:
            dynamix.weighted_average(net, since)
            since = 0
    return float(net.weight.detach().sum())


@pytest.mark.multiproc
def test_model_averaging_leaves_every_rank_with_the_same_model() -> None:
    first, second = run_ranks(_averaging, 2)
    assert first == second


def _contiguous(rank: int) -> dict[str, Any]:
    controller = dynamix.Controller("dbs", batch_size=8, max_batch_size=32)
    data = TensorDataset(*classes(240).tensors, torch.arange(240))
    job = Training(controller, data, sampling={"shuffle": False, "partition": "contiguous"})
    regions = []
    for epoch in range(4):
        job.sampler.set_epoch(epoch)
        mine: list[int] = []
        for x, y, index in job.loader:
            mine += index.tolist() if job.sampler.plan().counts[rank] else []
            job.backward(x, y)
            if rank == 1:
                time.sleep(0.01)  # far slower, whatever else the machine does
            job.finish()
        regions.append((min(mine), max(mine), len(mine)))
    controller.close()
    return {"regions": regions, "sizes": controller.batch_sizes.tolist()}


@pytest.mark.multiproc
def test_contiguous_partition_recuts_regions_each_epoch_by_share() -> None:
    first, second = run_ranks(_contiguous, 2)
    assert first["sizes"] == second["sizes"]
    for (low, high, count), (low2, high2, count2) in zip(first["regions"], second["regions"], strict=True):
        assert (low, high2) == (0, 239)
        assert high + 1 == low2
        assert (count, count2) == (high + 1, 240 - low2)
    assert first["regions"][0][2] == 120
    assert max(count for _, _, count in first["regions"]) > 150, "the slow worker's region never shrank"


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


@pytest.mark.parametrize("policy", ["goodput", "dynamix", "stigmergic"])
def test_a_state_whose_policy_kept_other_things_is_refused_whole_and_can_go_on_without_them(policy: str) -> None:
    state = _after_a_decision(policy)
    other = {"guarded": {"memory": {}}, "guard": {}} if policy == "dynamix" else {"memory": {}}
    state["policy"] = pack(other)
    state["checksum"] = checksum(state)
    controller = adaptive(policy)
    with pytest.raises(dynamix.StateError, match="does not fit"):
        controller.load_state_dict(state)
    assert controller.samples_seen == 0
    controller.load_state_dict(state, policy=False)
    assert controller.samples_seen > 0
