"""The choice of a way: right, alike on all ranks, and cheap. Times here are given, not measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamix.compression.auto import Chooser
from dynamix.errors import ConfigError

Cost = Callable[[int, str], float]


def _run(cost: Cost, steps: int, density: float, ranks: int = 2) -> tuple[list[str], float]:
    """The ways taken, and the time taken over that of dense alone. Rank 1 sees half as much again."""
    choosers = [Chooser() for _ in range(ranks)]
    ways, taken, dense = [], 0.0, 0.0
    for step in range(steps):
        plans = {chooser.next() for chooser in choosers}
        assert len(plans) == 1, "ranks must take the same way"
        way, timed = plans.pop()
        due = choosers[0].due
        for rank, chooser in enumerate(choosers):
            chooser.record(cost(step, way) * (1 + 0.5 * rank) if timed else None)
        if due:
            reports = [chooser.report(density) for chooser in choosers]
            least = [min(column) for column in zip(*reports, strict=True)]
            for chooser in choosers:
                chooser.agree(least)
        ways.append(way)
        taken += cost(step, way)
        dense += cost(step, "dense")
    return ways, taken / dense


def _fixed(dense: float, compaction: float, lhc: float) -> Cost:
    table = {"dense": dense, "compaction": compaction, "lhc": lhc}
    return lambda step, way: table[way]


@pytest.mark.parametrize("compaction", [1.2, 3.0, 10.0])
@pytest.mark.parametrize("density", [0.01, 0.3, 0.9])
def test_where_nothing_beats_dense_the_loss_stays_within_three_percent(compaction: float, density: float) -> None:
    ways, ratio = _run(_fixed(1.0, compaction, 2 * compaction), 1000, density)
    assert ratio < 1.03
    assert ways[-1] == "dense"
    if density > 0.6:
        assert set(ways) == {"dense"}


def test_the_faster_way_is_picked_and_kept() -> None:
    ways, ratio = _run(_fixed(1.0, 0.2, 0.5), 500, 0.05)
    assert ways[100:].count("compaction") > 380
    assert ratio < 0.3
    ways, ratio = _run(_fixed(1.0, 0.5, 0.2), 500, 0.05)
    assert ways[-1] == "lhc"
    assert ratio < 0.3


def test_a_gain_too_small_to_be_sure_of_is_left() -> None:
    ways, ratio = _run(_fixed(1.0, 0.98, 2.0), 500, 0.05)
    assert ways[-1] == "dense"
    assert ratio < 1.03


def test_links_that_slow_down_are_noticed() -> None:
    def cost(step: int, way: str) -> float:
        slow = step >= 400
        return {"dense": 10.0 if slow else 1.0, "compaction": 2.5 if slow else 1.6, "lhc": 4.0 if slow else 2.5}[way]

    ways, _ = _run(cost, 1000, 0.1)
    assert ways[399] == "dense"
    assert ways[520:].count("compaction") > 450


def test_links_that_speed_up_are_noticed() -> None:
    def cost(step: int, way: str) -> float:
        fast = step >= 400
        return {"dense": 0.5 if fast else 10.0, "compaction": 1.6 if fast else 2.5, "lhc": 2.0 if fast else 4.0}[way]

    ways, _ = _run(cost, 1000, 0.1)
    assert ways[399] == "compaction"
    assert ways[520:].count("dense") > 450


def test_budget_is_a_share() -> None:
    with pytest.raises(ConfigError, match="budget=0"):
        Chooser(budget=0)
