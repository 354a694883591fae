"""What docs/loop.md says to write for a gather of rows: they are those of the union, whatever the shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from tests.doc_blocks import BLOCK
from tests.ranks import run_cases
from tests.union import Script

pytestmark = pytest.mark.multiproc
PAGE = Path(__file__).parents[3] / "docs/loop.md"
SAMPLES = 70


def _from_the_page() -> str:
    (block,) = (text for _, text in BLOCK.findall(PAGE.read_text()) if "def gathered" in text)
    begin = block.index("def gathered")
    return str(block[begin : block.index("\n\n\nfor")])


def _gathered(options: dict[str, Any]) -> list[str]:
    """What is wrong with rows that are gathered in each batch: of numbers, of indices, and of pictures."""
    x = torch.arange(SAMPLES, dtype=torch.float32)[:, None]
    dataset, net = TensorDataset(x), nn.Linear(1, 1)
    controller = dynamix.Controller(
        Script([[9, 2, 1], [1, 8, 3], [6, 6, 0]]), 4, interval=1, min_batch_size=0, **options
    )
    sampler = controller.batch_sampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    model = controller.wrap(DDP(net), optimizer)
    names: dict[str, Any] = {"torch": torch, "dist": dist, "sampler": sampler}
    exec(_from_the_page(), names)
    wrong, begin = [], 0
    for (rows,) in loader:
        with controller.piece():
            model(rows).mean().backward()
        total = int(sampler.plan().counts.sum())
        expected = x[begin : begin + total]
        for make in (lambda r: r, lambda r: r.long().flatten(), lambda r: r[:, None, None].expand(-1, 2, 3, 1)):
            found: Tensor = names["gathered"](make(rows))
            if not torch.equal(found, make(expected)):
                wrong.append(f"from {begin}: {found.flatten().tolist()}")
        begin += total
        if controller.optimizer_due:
            optimizer.step()
            optimizer.zero_grad()
        controller.step()
    controller.close()
    return [*wrong, *([] if begin == SAMPLES else [f"{begin} samples"])]


def test_rows_of_all_ranks_are_those_of_the_union() -> None:
    assert run_cases(_gathered, 3, [{}, {"accumulate": 2}, {"global_batch": "adaptive"}]) == [[[], [], []]] * 3
