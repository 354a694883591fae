"""Rounds cut by what samples cost, on real ranks: gradients are the union's, and times are told by cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError
from dynamix.runtime.decide.decision import Decider
from dynamix.window import Window
from tests.ranks import refusal, run_ranks
from tests.runtime.jobs import Training


def _job(lengths: Any, **options: Any) -> Training:
    torch.manual_seed(0)
    data, net = TensorDataset(torch.randn(240, 3)), nn.Linear(3, 1)
    return Training(dynamix.Controller("static", 8, interval=2, **options), data, net, sampling={"lengths": lengths})


def _train(job: Training, batches: int | None = None) -> list[list[int]]:
    """Train so many batches; the counts of every round."""
    rounds = []
    for (x,) in itertools.islice(job.loader, batches):
        with job.controller.piece():
            job.model(x).square().mean().backward()
        if job.sampler.piece().last:
            rounds.append(job.sampler.plan().counts.tolist())
        job.finish()
    return rounds


LENGTHS = np.exp(np.random.default_rng(0).normal(size=240))


def _windows(rank: int) -> Any:
    seen: list[Window] = []
    assemble = Decider.assemble

    def watched(self: Decider, *given: Any) -> Window:
        seen.append(assemble(self, *given))
        return seen[-1]

    Decider.assemble = watched  # type: ignore[method-assign]
    job = _job(LENGTHS)
    rounds = _train(job)
    job.controller.close()
    return rounds, [window.work.tolist() for window in seen]


def test_windows_tell_what_was_worked_on() -> None:
    rounds, windows = run_ranks(_windows, 2)[0]
    assert len({tuple(counts) for counts in rounds}) > 3
    order = torch.randperm(240, generator=torch.Generator().manual_seed(0)).numpy()
    works, begin = [], 0
    for counts in rounds:
        ends = begin + np.cumsum(counts)
        works.append(
            [LENGTHS[order[end - n : end]].sum() / LENGTHS.mean() for n, end in zip(counts, ends, strict=True)]
        )
        begin = int(ends[-1])
    assert windows
    for number, work in enumerate(windows):
        steps = np.array(works[2 * number : 2 * number + 2])
        for told, of_rank in zip(work, steps.T, strict=True):  # a step in which somebody paused is left out
            assert any(told == pytest.approx(value) for value in (of_rank.mean(), *of_rank))


def _other_lengths(rank: int) -> str:
    job = _job(LENGTHS if rank else LENGTHS[::-1].copy())
    return refusal(dynamix.UsageError, _train, job)


def test_ranks_with_other_lengths_are_told() -> None:
    for said in run_ranks(_other_lengths, 2):
        assert "lengths" in said
        assert "batch_sampler(dataset, lengths=...)" in said


def _apart(rank: int) -> tuple[int, list[float]]:
    job = _job(LENGTHS, meet="parameters", micro_batch=2)
    _train(job)
    samples = job.controller.samples_seen
    job.controller.close()
    return samples, job.weights().tolist()


def test_workers_that_step_apart_are_cut_by_cost_too() -> None:
    first, second = run_ranks(_apart, 2)
    assert first == second
    assert first[0] == 240


@pytest.mark.parametrize(
    ("sampler", "options", "said"),
    [
        ({"padded": True}, {}, "padded=True"),
        (
            {"padded": True, "lengths": LENGTHS},
            {"meet": "parameters", "micro_batch": 4},
            r"with meet='parameters' and meet='auto'",
        ),
        ({"padded": True, "lengths": LENGTHS}, {"global_batch": "adaptive"}, "noise scale"),
        ({"lengths": LENGTHS, "partition": "contiguous"}, {}, "partition"),
        ({"lengths": LENGTHS[1:]}, {}, r"\(239,\)"),
    ],
)
def test_what_does_not_go_together_is_refused(sampler: Any, options: Any, said: str) -> None:
    controller = dynamix.Controller("static", 8, **options)
    with pytest.raises(ConfigError, match=said):
        controller.batch_sampler(TensorDataset(torch.randn(240, 3)), **sampler)
    controller.close()
