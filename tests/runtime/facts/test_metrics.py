"""Where a job stands, for loops and loggers: `progress`, `epoch_done`, `metrics()`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset

import dynamix
from dynamix.runtime.metrics import METRICS
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, classifier
from tests.union import Script

SAMPLES = 101
DATA = classes(SAMPLES, 4)
SCRIPT = [[5], [9], [7], [3]]
DOCS = Path(__file__).parents[3] / "docs" / "logging.md"


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def _steps(job: Training) -> Iterator[None]:
    for x, y in job.loader:
        logits = job.model(x)
        loss = F.cross_entropy(logits, y)
        (loss / job.controller.accumulate).backward()
        job.finish(loss=loss, logits=logits, target=y)
        yield


def _job(accumulate: int = 1) -> Training:
    return Training(adaptive(Script(SCRIPT, accumulate), 4, accumulate=accumulate), DATA, classifier(4))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_progress_counts_the_samples_of_the_epoch_and_epoch_done_is_its_last_step(accumulate: int) -> None:
    job = _job(accumulate)
    controller = job.controller
    assert (controller.progress, controller.epoch_done) == (0.0, False)
    for _ in range(2):
        seen, done = [0.0], []
        for _ in _steps(job):
            seen.append(controller.progress)
            done.append(controller.epoch_done)
        assert all(before < after for before, after in itertools.pairwise(seen))
        assert seen[-1] == 1.0
        assert done == [False] * (len(done) - 1) + [True]
    assert controller.samples_seen == 2 * SAMPLES
    assert (controller.progress, controller.epoch_done) == (1.0, True)
    next(iter(job.loader))
    assert (controller.progress, controller.epoch_done) == (0.0, False)


@pytest.mark.parametrize(("source", "known"), [([*zip(*DATA.tensors, strict=True)], True), (Unsized(), False)])
def test_progress_of_a_stream_is_unknown_until_its_end_where_its_length_is(source: Any, known: bool) -> None:
    net, controller = classifier(4), dynamix.Controller("static", 8)
    optimizer, stream, seen = torch.optim.SGD(net.parameters(), lr=0.1), controller.stream(source), []
    controller.wrap(net, optimizer)
    for x, y in stream:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        controller.step()
        seen.append(controller.progress)
    assert seen[-1] == 1.0
    assert controller.epoch_done
    assert all(math.isfinite(value) == known for value in seen[:-1])


def test_before_there_are_batches_they_say_what_is_missing_and_metrics_are_there_all_the_same() -> None:
    controller = dynamix.Controller(batch_size=4, global_batch="adaptive")
    for ask in (lambda: controller.progress, lambda: controller.epoch_done):
        with pytest.raises(dynamix.UsageError, match="make a sampler or a stream first"):
            ask()
    assert list(controller.metrics()) == list(METRICS)


def test_metrics_of_one_process() -> None:
    job = _job()
    controller = job.controller
    for _ in _steps(job):
        now = controller.metrics()
        assert list(now) == list(METRICS)
        assert all(type(value) is float for value in now.values())
        assert now["samples"] == controller.samples_seen
        assert now["progress"] == controller.progress
        assert now["batch_size"] == now["global_batch"] == controller.batch_sizes[0]
    assert now["windows"] >= now["changes"] >= 2
    for name in ("compute_s", "loss", "overhead_s"):
        assert now[name] > 0, name
    assert 0 <= now["accuracy"] <= 1
    assert now["unread"] == 0
    assert math.isnan(now["exchange_s"]) or now["exchange_s"] >= 0
    job.backward(*next(iter(job.loader)))
    job.update()
    with pytest.warns(RuntimeWarning, match="cannot read the loss"):
        controller.step(loss="much")
    assert controller.metrics()["unread"] == 1


def test_there_are_at_most_20_and_the_docs_say_what_each_means() -> None:
    assert len(METRICS) <= 20
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {meaning} |" for name, meaning in METRICS.items()]


def _two(rank: int) -> list[dict[str, float]]:
    controller = adaptive(Script([[3, 7], [6, 5]]), 4, lr_rule="linear")
    job = Training(controller, DATA, classifier(4), num_workers=1)
    found = []
    for _ in range(2):
        for _ in _steps(job):
            found.append(controller.metrics() | {"done": float(controller.epoch_done)})
    controller.close()
    return found


@pytest.mark.multiproc
def test_ranks_agree_on_what_is_of_the_job() -> None:
    first, second = run_ranks(_two, 2)
    of_job = ("step", "samples", "epoch", "progress", "global_batch", "lr_factor", "windows", "changes", "done")
    for one, other in zip(first, second, strict=True):
        assert all(one[name] == other[name] for name in of_job)
        assert one["batch_size"] + other["batch_size"] == one["global_batch"]
    assert [m["done"] for m in first].count(1.0) == 2
    assert first[-1]["exchange_s"] > 0
    assert first[-1]["noise_scale"] > 0 or math.isnan(first[-1]["noise_scale"])
    assert {m["lr_factor"] for m in first} > {1.25}
