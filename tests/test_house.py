"""Figures of the house may only fall: `scripts/house` counts them, `scripts/house.json` holds what they may be."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import run

SCRIPT = Path(__file__).parent.parent / "scripts" / "house"
house = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.mark.timeout(300)
def test_no_figure_is_above_its_threshold() -> None:
    run(SCRIPT, "--check", timeout_s=290)


def test_lines_of_code_leave_out_blank_ones_comments_and_docstrings() -> None:
    text = '"""What.\n\nMore.\n"""\n# why\n\ndef f(\n    a,\n):\n    "Said."\n    return """x\ny"""  # told\n'
    assert house.code_lines(text) == 5


def test_what_is_written_into_others_is_found_in_every_form() -> None:
    text = "self.a = 1\nx.b, y.c = 1, 2\nx.d += 1\nsetattr(x, 'e', 1)\nobject.__setattr__(self, 'f', 1)\np.grad = None"
    assert sorted(name for _, name in house.written(ast.parse(text))) == ["b", "c", "d", "e", "grad"]


def test_a_chain_stays_in_its_folder_and_ends_in_a_circle() -> None:
    graph = {"d.r.a": {"d.r.b", "d.s.x"}, "d.r.b": {"d.r.c"}, "d.r.c": set(), "d.s.x": {"d.s.y"}, "d.s.y": {"d.s.x"}}
    found = house.chains(graph)
    assert found["chain in r"] == (3, "a > b > c")
    assert found["chain in s"].value == 2


def test_a_figure_above_its_threshold_is_named_with_both_and_where() -> None:
    figures = {"calls": house.Figure(11, "here.py"), "lines": house.Figure(50)}
    above, below = house.judged(figures, {"calls": 10, "lines": 100})
    assert above == ["calls: 11 is above its threshold 10; where: here.py"]
    assert below == ["lines: threshold 100 may fall to 50 (scripts/house --lower)"]
