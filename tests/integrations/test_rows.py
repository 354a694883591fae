"""Every row of jobs, under every framework: gradients of the union batch, each sample once an epoch."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import loops
from tests.integrations.jobs import check_rows, run_rows

STACKS: dict[str, Any] = {
    "accelerate": (partial(loops.train, stack="accelerate"), loops.ROWS + loops.IN_PIECES),
    "fabric": (partial(loops.train, stack="fabric"), loops.ROWS + loops.IN_PIECES),
    "lightning": (loops.lightning, loops.ROWS),
}
if importlib.util.find_spec("transformers"):
    from tests.integrations import test_transformers

    STACKS["transformers"] = (test_transformers.train, loops.ROWS)


@pytest.mark.multiproc
@pytest.mark.timeout(500)
def test_every_row_is_exact_under_every_framework(tmp_path: Path) -> None:
    trained = run_rows(STACKS, tmp_path)
    for stack, (_, rows) in STACKS.items():
        check_rows(stack, rows, trained[stack])
