"""What `auto` decides with this distribution installed is what 0.2 decided; an aggregator is left and tried again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dynamix.compression import ways
from dynamix.compression.auto import Chooser
from dynamix.compression.spread import Spread
from dynamix_homomorphic.aggregator.link import CANDIDATES
from tests.homomorphic.decisions import THROUGH, decisions, sent

RECORDED = json.loads((Path(__file__).parent / "recorded_ways.json").read_text(encoding="utf-8"))


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def test_every_decision_is_the_recorded_one() -> None:
    assert ways.registry().candidates == ("gather", "blocks", "compaction", "lhc")
    assert CANDIDATES == THROUGH
    found = {name: {"last": trace[-2][0], "digest": _digest(trace)} for name, trace in decisions().items()}
    assert found == RECORDED["decisions"]
    assert {one["last"] for one in found.values()} >= {"dense", "gather", "blocks", "compaction"}


def test_every_way_sends_what_it_did() -> None:
    assert {name: _digest(of) for name, of in sent().items()} == RECORDED["sent"]


def test_a_changed_constant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix_homomorphic.ways.LARGE", {"compaction": 1.01, "lhc": 1.45, "lhc-one-phase": 1.74})
    assert {name: _digest(of) for name, of in sent().items()} != RECORDED["sent"]


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
