"""What `auto` expects of a way is what the wire carries; an aggregator is left and tried again."""

from __future__ import annotations

import pytest
import torch

from dynamix.compression import Layout, ways
from dynamix.compression.auto import Chooser
from dynamix.compression.spread import Spread
from dynamix.compression.traffic import traffic
from tests.compression.local import exchange

ROWS, WIDTH, OWN = 4000, 16, 250


@pytest.mark.parametrize("workers", [4, 12])
@pytest.mark.parametrize("shared", [True, False])
def test_the_bytes_that_auto_expects_are_those_that_are_sent(workers: int, shared: bool) -> None:
    assert ways.registry().candidates == ("gather", "blocks", "compaction", "lhc")
    layout, item = Layout.of([(ROWS, WIDTH)]), 4 * WIDTH + 4
    inputs = [torch.zeros(ROWS, WIDTH) for _ in range(workers)]
    for rank, gradient in enumerate(inputs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0 if shared else rank))
        gradient[order[:OWN]] = 1.0
    union = int(torch.stack(inputs).any(0).any(1).sum())
    spread = Spread([OWN * item] * workers, union * item, 4 * ROWS * WIDTH, 4 * union)
    flat = [gradient.view(-1) for gradient in inputs]
    for way in ("gather", "blocks", "fixed", "compaction", "lhc", "lhc-one-phase"):
        # Later steps: the first ones learn the index's depth and the union's size.
        first, later = (exchange(flat, way, layout, steps=steps)[1][0] for steps in (1, 3))
        ring = 2 * (workers - 1) / workers  # of a buffer, that an all-reduce sends through every link
        sent = (later.payload_bytes - first.payload_bytes) / 2 * ring
        assert traffic(way, spread).bytes == pytest.approx(sent, rel=0.15), way


def test_an_aggregator_that_goes_and_comes_back_is_left_and_tried_again() -> None:
    through = ("gather", "compaction", "aggregator-compaction")
    cost = {"dense": 9.0, "gather": 3.0, "compaction": 2.0, "aggregator-compaction": 1.0}
    chooser, taken = Chooser(through), []

    def train(steps: int) -> None:
        for _ in range(steps):
            way, timed = chooser.next()
            due = chooser.due
            chooser.record(cost[way] if timed else None)
            taken.append(way)
            if due:
                chooser.agree(chooser.report(hop_s=1e-5, byte_s=1e-9), Spread([50_000] * 4, 100_000, 1_000_000))

    train(100)
    assert taken[-1] == "aggregator-compaction"
    chooser.restrict(("gather", "compaction"))
    train(100)
    assert "aggregator-compaction" not in taken[100:]
    assert taken[100] == taken[-1] == "compaction"
    chooser.restrict(through)
    train(100)
    assert taken[-1] == "aggregator-compaction"
