"""Lightning's Trainer with the callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.jobs import check_other_batches
from tests.integrations.loops import lightning, lightning_on_two_ranks
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiproc
Told = list[tuple[list[float], list[str]]]


def test_batches_of_another_size_are_counted_anew(tmp_path: Path) -> None:
    check_other_batches(lightning, tmp_path)


def test_a_fit_ends_when_the_budget_is_spent(tmp_path: Path) -> None:
    from tests.integrations.lightning_jobs import spent

    assert spent(tmp_path) == 2 * 48


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = str(tmp_path_factory.mktemp("lightning"))
    return run_ranks(lightning_on_two_ranks, 2, folder, timeout_s=100, frameworks=True)


def test_manual_optimisation_has_the_gradient_of_the_union(told: Told) -> None:
    for furthest, _ in told:
        assert max(furthest) < 1e-5


def test_several_loaders_are_refused_on_all_ranks_with_what_to_write(told: Told) -> None:
    for _, said in told:
        assert all("give it one loader, of a data set whose samples have a part of each" in one for one in said), said
