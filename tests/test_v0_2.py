"""Jobs of 0.2 go on: states of every kind, policy files and events files, as the code of 0.2 wrote them."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten

from dynamix.errors import DynamixError
from dynamix.policies import make_policy
from dynamix.policies.files import describe_policy
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks
from tests.v0_2 import CASES, FIXTURES, SAMPLES, Case, Job

STAY = [case for case in CASES if case.refused is None]
GONE = [case for case in CASES if case.refused is not None]


def saved(case: Case) -> dict[str, Any]:
    """What make.py wrote of a case."""
    read: dict[str, Any] = torch.load(FIXTURES / "states" / f"{case.state or case.name}.pt", weights_only=True)
    return read


def _go_on(rank: int, cases: list[Case]) -> dict[str, Any]:
    """For every case: what the job says once it has loaded, and once it has trained the epoch and one round more."""
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {}
    for case in cases:
        was = saved(case)
        try:
            job = Job(case, rank)
            states = was["states"]
            job.controller.load_state_dict(states[rank if len(states) > 1 else 0])
        except (DynamixError, ImportError) as error:
            told[case.name] = f"{type(error).__name__}: {error}"
            continue
        job.epoch = was["epoch"]
        loaded, rest, trained = job.facts(), list[int](), job.trained
        if not job.controller.epoch_done:
            job.train()
            rest = list(trained)
        done = job.controller.samples_seen
        job.epoch = was["epoch"] + 1
        job.train(2)
        job.close()
        told[case.name] = loaded, rest, done, job.controller.samples_seen
    return told


@pytest.fixture(scope="module")
def went_on() -> dict[str, list[Any]]:
    """What every rank told, by case."""
    told: dict[str, list[Any]] = {}
    for workers in {case.workers for case in CASES}:
        cases = [case for case in CASES if case.workers == workers]
        for of_rank in run_ranks(_go_on, workers, cases, timeout_s=200):
            for name, value in of_rank.items():
                told.setdefault(name, []).append(value)
    return told


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("case", STAY, ids=lambda case: case.name)
def test_a_job_goes_on_from_its_state(case: Case, went_on: dict[str, list[Any]]) -> None:
    was, ranks = saved(case), went_on[case.name]
    assert not [told for told in ranks if isinstance(told, str)]
    for loaded, _, done, later in ranks:
        for name in ("samples", "sizes", "progress"):
            assert loaded[name] == was[name], name
        assert done == was["samples"] + SAMPLES - len(was["trained"])
        assert later > done
    rest = [sample for _, mine, _, _ in ranks for sample in mine]
    assert Counter(was["trained"] + rest) == Counter(range(SAMPLES))  # every sample once, across the versions


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("case", GONE, ids=lambda case: case.name)
def test_a_state_that_holds_a_removed_part_is_refused_by_name(case: Case, went_on: dict[str, list[Any]]) -> None:
    for told in went_on[case.name]:
        assert isinstance(told, str), "it loads"
        assert str(case.refused) in told


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_distributed_checkpoint_becomes_a_state_as_the_upgrade_page_says(tmp_path: Path) -> None:
    state = saved(next(case for case in STAY if case.name == "alone"))["states"][0]
    distributed.save({"controller": state}, checkpoint_id=tmp_path / "old", no_dist=True)
    dcp_to_torch_save(tmp_path / "old", tmp_path / "old.pt")
    became = torch.load(tmp_path / "old.pt", weights_only=True)["controller"]
    (leaves, spec), (was, of) = tree_flatten(became), tree_flatten(state)
    assert (spec, [str(leaf) for leaf in leaves]) == (of, [str(leaf) for leaf in was])


def test_every_state_is_of_a_case() -> None:
    assert {file.stem for file in (FIXTURES / "states").iterdir()} == {case.state or case.name for case in CASES}
    assert sum(file.stat().st_size for file in FIXTURES.rglob("*") if file.is_file()) < 3e6


def _window() -> Window:
    sizes = torch.tensor([4, 4]).numpy()
    seconds = torch.tensor([0.1, 0.2], dtype=torch.float64).numpy()
    known = {"compute": seconds, "wait": seconds[::-1] - 0.1, "communication": 0 * seconds + 0.01}
    return Window.of(sizes, **known, steps=5, base_batch=8, micro_batches=1, age=5, step=5)


def test_a_policy_file_of_a_users_own_decides() -> None:
    file = FIXTURES / "policies" / "own.safetensors"
    assert describe_policy(file)["architecture"]["hidden"] == 16
    policy = make_policy(str(file))
    bounds = Bounds.of(2, 1, 32)
    for _ in range(3):
        assert len(policy.decide(_window(), bounds)) == 2
