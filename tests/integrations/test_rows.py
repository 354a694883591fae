"""Every row of jobs, under every framework: gradients of the union batch, each sample once an epoch."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest

from tests.integrations import loops, test_lightning
from tests.integrations.jobs import Stacks, check_rows, run_rows

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(500)]
STACKS: dict[str, Any] = {
    "accelerate": (partial(loops.train, stack="accelerate"), loops.ROWS + loops.IN_PIECES),
    "fabric": (partial(loops.train, stack="fabric"), loops.ROWS + loops.IN_PIECES),
    "lightning": (test_lightning.fit, loops.ROWS),
}
if importlib.util.find_spec("transformers"):
    from tests.integrations import test_transformers

    STACKS["transformers"] = (test_transformers.train, loops.ROWS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    stacks: Stacks = STACKS
    return run_rows(stacks, tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("stack", STACKS)
def test_every_row_is_exact(stack: str, trained: Any) -> None:
    check_rows(STACKS[stack][1], trained[stack])
