"""The map of where homomorphic sums win: its model is that of the library, and its table says what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.compression.spread import Spread
from dynamix.compression.traffic import HEADER_BYTES, traffic
from dynamix_lab.suites.compression.region import HOMOMORPHIC, MapCell, compare, make_map, sections, sent


def test_a_gather_costs_own_rows_and_compaction_the_union() -> None:
    apart, same = MapCell(8, 0.1, 0.0, 0.01), MapCell(8, 0.1, 1.0, 0.01)
    assert apart.spread.union_bytes == pytest.approx(8 * same.spread.union_bytes, rel=0.01)
    assert apart.seconds("gather") == same.seconds("gather")
    assert apart.seconds("compaction") > 6 * same.seconds("compaction")
    assert apart.ratio("compaction") < 1 < same.seconds("gather") / same.seconds("compaction")


def test_a_host_that_adds_for_all_has_their_bytes_on_its_link() -> None:
    spread = Spread([1000] * 8, 5000, 1_000_000)
    inside, host = (sent(f"aggregator {where}", spread, 1000) for where in ("in the switch", "on a host"))
    assert host.bytes == 8 * inside.bytes


def test_two_levels_send_less_the_more_rows_are_shared() -> None:
    apart, same = (Spread([1000] * 16, union, 1_000_000) for union in (16_000, 1000))
    assert traffic("gather", same).bytes < 0.5 * traffic("gather", apart).bytes
    headers = 2 * 15 * HEADER_BYTES  # in each level from all to all
    assert traffic("gather", apart).bytes == pytest.approx(15_000 + headers, rel=0.01)


def test_the_command_prints_the_map_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "compression-map", "--out", "run"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["command"] == "dynamix bench compression-map"
    assert len(result["cells"]) == 225
    assert "Where homomorphic sums win" in done.output
    assert set(result["cells"][0]["ratios"]) == set(HOMOMORPHIC)


def test_measured_bytes_stand_beside_those_of_the_model() -> None:
    spread = {"sizes": [1000] * 4, "union_bytes": 3900, "dense_bytes": 256 * 1000}
    ways = {"dense": {"sent_bytes_per_step": 400_000}, "gather": {"sent_bytes_per_step": 3300, "spread": spread}}
    found = compare({"cells": {"one": {"ways": ways}, "identity": {}}})
    assert [one["way"] for one in found] == ["dense", "gather"]
    assert found[0]["measured_over_model"] == pytest.approx(400 / 384, abs=0.001)
    made = sections({**make_map(), "against": found})
    assert [section.heading for section in made][-1] == "The model beside measured bytes"
