"""Batches that are not what was dealt: refused where that is certain, and a loop that is right never is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, default_collate

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.runtime.check.loops import Job, Loops
from tests.runtime.jobs import Training, classes, order_of

pytestmark = pytest.mark.multiproc
LOOPS = Loops()
wrong, right, right_with = LOOPS.wrong, LOOPS.right, LOOPS.right_with


def _losing(batches: Iterable[Any]) -> Iterator[Any]:
    """Some without their first sample, once the loop has shown how its batches are."""
    for i, (x, y) in enumerate(batches):
        yield (x[1:], y[1:]) if i >= 9 and i % 2 else (x, y)


class _WithGaps:
    """Samples that cannot be read come as None: some of those that an epoch deals last."""

    def __init__(self) -> None:
        self.samples, self.gone = classes(96), set(order_of(96)[76::4].tolist())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return None if i in self.gone else self.samples[i]


def _without_gaps(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


@wrong("controller.weight(loss, count=n)", num_workers=1)
def _collate_drops(job: Job) -> None:
    job.loader = DataLoader(
        _WithGaps(), batch_sampler=job.sampler, num_workers=job.num_workers, collate_fn=_without_gaps
    )
    for x, y in job.batches(2):
        job.train(x, y)


@wrong("controller.weight(loss, count=n)")
def _loop_drops(job: Job) -> None:
    for x, y in _losing(job.batches(2)):
        loss = job.loss(x, y)
        loss.backward()
        job.update()
        job.step(loss=loss)


@wrong("controller.step(count=")
def _loop_drops_on_one_rank_and_passes_keywords(job: Job) -> None:
    for x, y in _losing(job.batches(2)) if job.rank else job.batches(2):
        F.cross_entropy(job.ddp(input=x), y).backward()
        job.update()
        job.step()


class _OfDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, inputs: Any, where: Any = None) -> Tensor:
        return self.body(inputs["x"] if where is None else inputs)


@wrong("controller.weight(loss, count=n)")
def _loop_drops_of_dicts(job: Job) -> None:
    job.net = _OfDicts()
    job.ddp = DDP(job.net, process_group=job.group)
    job.optimizer = torch.optim.SGD(job.net.parameters(), lr=0.1)
    for x, y in _losing(job.batches(2)):
        _trained(job, F.cross_entropy(job.ddp({"x": x, "y": y}), y))


def test_lost_samples_end_the_job_on_every_rank_with_the_line_to_write() -> None:
    LOOPS.check_wrong(2)


def _trained(job: Job, loss: Tensor, **told: Any) -> None:
    loss.backward()
    job.update()
    job.step(loss=loss, **told)


@right
def _two_views_later(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches(3)):
        views = [x] if i < 9 else [x, -x]
        _trained(job, F.cross_entropy(job.ddp(torch.cat(views)), y.repeat(len(views))))


@right
def _padded_to_one_shape(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches(3)):
        padded = x if i < 9 else F.pad(x, (0, 0, 0, 8 - len(x)))
        _trained(job, F.cross_entropy(job.ddp(padded)[: len(x)], y))


@right
def _in_two_halves(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches(3)):
        if i > 9 and len(x) > 2:
            with job.ddp.no_sync():
                (job.loss(x[:1], y[:1]) / len(x)).backward()
            _trained(job, job.loss(x[1:], y[1:]) * (len(x) - 1) / len(x))
        else:
            _trained(job, job.loss(x, y))


@right
def _masked_and_said(job: Job) -> None:
    for x, y in _losing(job.batches(3)):
        samples = job.sampler.piece().samples
        _trained(job, F.cross_entropy(job.ddp(x), y, reduction="sum") / samples, count=samples)


@right
def _nodes_of_graphs(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches(3)):
        nodes = 1 + (torch.arange(len(x)) + i) % 3 * (i > 9)
        graph = torch.arange(len(x)).repeat_interleave(nodes)
        told = job.ddp(x.repeat_interleave(nodes, 0))
        _trained(job, F.cross_entropy(torch.zeros(len(x), 3).index_add(0, graph, told), y))


@right
def _dicts_and_objects(job: Job) -> None:
    job.net = _OfDicts()
    job.ddp = DDP(job.net, process_group=job.group)
    job.optimizer = torch.optim.SGD(job.net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(job.batches(3)):
        some, of = (x, y) if i < 9 else (x[1:], y[1:])
        where = range(len(some)) if i % 3 else {"of": [torch.zeros(len(x))]}
        logits = job.ddp({"x": x}) if i % 2 else job.ddp(some, where)
        _trained(job, F.cross_entropy(logits, y if i % 2 else of))


@right
def _weighted_by_its_own_count(job: Job) -> None:
    job.controller.wrap(job.ddp, job.optimizer, weighting="loss")
    for x, y in _losing(job.loader):
        job.controller.weight(job.loss(x, y), count=len(x)).backward()
        job.update()
        job.step()


def test_loops_that_are_right_stay_silent() -> None:
    LOOPS.check_right()


# How many samples more a data set has from its second epoch on, on which ranks, and whether epochs are named.
CHANGES: dict[str, tuple[int, tuple[int, ...], bool]] = {
    "more": (10, (0, 1), True),
    "fewer": (-3, (0, 1), False),
    "more on one rank": (1, (1,), True),
    "none": (0, (), True),
}


def _changing(rank: int, change: int, on: tuple[int, ...], named: bool) -> str:
    """What becomes of a job whose data set comes to have another length."""
    data = list(classes(64))
    training = Training(dynamix.Controller("static", 8, process_group=dist.new_group()), data)
    steps = 0
    try:
        for epoch in range(3):
            if named:
                training.sampler.set_epoch(epoch)
            for x, y in training.loader:
                training.train(x, y)
                steps += 1
            if rank in on and epoch == 0:
                data[64 + min(change, 0) :] = data[: max(change, 0)]
    except UsageError as error:
        return f"after {steps}: {error}"
    training.controller.close()
    return f"silent after {steps}"


def _changes(rank: int) -> dict[str, str]:
    return {case: _changing(rank, *given) for case, given in CHANGES.items()}


def test_a_data_set_of_another_length_ends_the_job_on_all_ranks() -> None:
    for told in run_ranks(_changes, 2):
        assert told.pop("none") == "silent after 12"
        for case, said in told.items():
            assert said.startswith(("after 4", "after 5")), (case, said)
            assert f"the data set has {64 + CHANGES[case][0]} samples, and had 64" in said, case
