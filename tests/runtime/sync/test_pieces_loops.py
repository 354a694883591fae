"""Loops over pieces that are right or wrong, broken off and resumed, and what pieces do not fit."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import UsageError
from tests.ranks import run_ranks
from tests.runtime.check.loops import Job, Loops
from tests.runtime.jobs import Training, adaptive, classes
from tests.union import Script

LOOPS = Loops()


@LOOPS.wrong("if controller.optimizer_due", micro_batch=2)
def _the_optimizer_steps_with_every_piece(job: Job) -> None:
    for x, y in job.batches():
        job.train(x, y)


@LOOPS.wrong("torch.no_grad()", micro_batch=2)
def _a_pass_that_records_gradients_has_no_backward_pass(job: Job) -> None:
    for x, y in job.batches():
        job.loss(x, y).backward()
        if job.controller.optimizer_due:
            job.update()
            job.loss(x, y)
        job.step()


@LOOPS.wrong("controller.step() once for every batch", micro_batch=2)
def _one_step_a_round(job: Job) -> None:
    for x, y in job.batches():
        with job.controller.piece():
            job.loss(x, y).backward()
        if job.controller.optimizer_due:
            job.update()
            job.step()


@LOOPS.wrong("SyncBatchNorm", micro_batch=2)
def _a_model_that_mixes_samples_of_all_ranks(job: Job) -> None:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    job.controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), weighting="loss")


@LOOPS.wrong("after the same optimizer step on all ranks", micro_batch=2)
def _leaves_an_epoch_after_so_many_batches(job: Job) -> None:
    job.wrap()
    for _ in range(3):
        for x, y in itertools.islice(job.loader, 5):
            _train(job, x, y)


def _train(job: Job, x: Tensor, y: Tensor) -> bool:
    """Whether this was the last piece of its round."""
    with job.controller.piece():
        (job.loss(x, y) / job.accumulate).backward()
    if due := job.controller.optimizer_due:
        job.update()
    job.step()
    return due


@LOOPS.right
@LOOPS.right_with(micro_batch=2)
@LOOPS.right_with(accumulate=2)
def _as_it_should_be(job: Job) -> None:
    for x, y in job.batches(2):
        _train(job, x, y)


@LOOPS.right_with(micro_batch=2)
def _leaves_an_epoch_after_so_many_rounds(job: Job) -> None:
    job.wrap()
    for epoch in range(3):
        job.sampler.set_epoch(epoch)
        rounds = 0
        for x, y in job.loader:
            rounds += _train(job, x, y)
            if rounds == 3:
                break


@pytest.mark.multiproc
def test_wrong_loops_end_on_every_rank_with_the_line_to_write() -> None:
    LOOPS.check_wrong(2)


@pytest.mark.multiproc
def test_right_loops_are_silent() -> None:
    LOOPS.check_right()


def test_pieces_of_a_round_that_is_dealt_anew_are_not_added_again() -> None:
    job = Training(dynamix.Controller("static", 16, micro_batch=4, global_batch="adaptive"), classes(64))

    def train(batches: int) -> None:
        for x, y in itertools.islice(job.loader, batches):
            job.train_piece(x, y)

    train(4 + 2)
    job.optimizer.zero_grad()
    train(2)
    with pytest.raises(UsageError, match=r"zero_grad\(\)"):
        train(2)


def _resumed(rank: int, folder: str, stop_after: int | None) -> list[int]:
    """Indices whose rounds were finished by this rank; stops in the middle of a round and saves, or resumes."""
    shares = [[7, 9, 4], [12, 2, 6]] if stop_after is None else [[16, 3], [5, 12]]
    controller = adaptive(Script(shares), max_batch_size=32, micro_batch=4)
    file = Path(folder) / f"state{min(rank, 1)}.pt"
    if stop_after is None:
        controller.load_state_dict(torch.load(file, weights_only=True))
    data = TensorDataset(torch.arange(173), *classes(173).tensors)
    job = Training(controller, data, lr=0.01, num_workers=2)
    finished: list[int] = []
    under_way: list[int] = []
    rounds = 0
    for index, x, y in job.loader:
        under_way += index.tolist() if job.sampler.piece().samples else []
        if due := controller.optimizer_due:
            finished, under_way, rounds = finished + under_way, [], rounds + 1
        job.train_piece(x, y)
        if rounds == stop_after and (not due or job.sampler.piece().last):
            # The rank with several pieces is inside of a round here, the other one between two.
            torch.save(controller.state_dict(), file)
            break
    return finished


@pytest.mark.multiproc
def test_a_state_saved_within_a_round_goes_on_after_the_last_whole_one_on_more_ranks(tmp_path: Path) -> None:
    before, after = run_ranks(_resumed, 2, str(tmp_path), 5), run_ranks(_resumed, 3, str(tmp_path), None)
    assert Counter(i for part in (*before, *after) for i in part) == Counter(range(173))


def _read_far_ahead() -> None:
    controller = dynamix.Controller("static", 8, micro_batch=4, interval=2)
    job = Training(controller, data := classes(400))
    for x, y in DataLoader(data, batch_sampler=job.sampler, num_workers=2, prefetch_factor=8):
        job.train_piece(x, y)
    controller.close()


def test_a_loader_that_reads_more_than_two_windows_ahead_is_said() -> None:
    with pytest.warns(RuntimeWarning, match="reads . rounds ahead, more than two windows of 2"):
        _read_far_ahead()
