"""Pages of benches: what a narrow screen shows first, and lines and points that can be told apart."""

from __future__ import annotations

import itertools
import re

from dynamix_lab.report import Page, Section, Table, dot, legend_below, look, new_figure
from dynamix_lab.report.figures import svg


def test_a_page_shows_ratios_first_and_long_text_last() -> None:
    table = Table(["row", "tuned to", "seconds", "over static"], [["dbs", "a rate " * 9, "3.1", "0.81"]])
    page = Page("t", [Section(table=table)], details={"seeds": "[0]", "plan": "x" * 400}).html()
    assert re.findall(r"<th[^>]*>([^<]*)</th>", page) == ["row", "over static", "seconds", "tuned to"]
    assert re.findall(r'<td data-head="([^"]*)"', page) == ["row", "over static", "seconds", "tuned to"]
    assert table.markdown().startswith("| row | tuned to | seconds | over static |")
    assert "<details><summary>plan</summary>xxx" in page
    assert "seeds: [0]" in page
    assert "prefers-color-scheme: dark" in page


def test_lines_and_points_can_be_told_apart() -> None:
    looks = [(look(i)["color"], look(i)["ls"]) for i in range(32)]
    dots = [(dot(i)["color"], dot(i)["marker"], dot(i)["mfc"]) for i in range(16)]
    assert len(set(looks)) == 32
    assert len(set(dots)) == 16
    for a, b in itertools.pairwise(looks):
        assert a[0] != b[0]
        assert a[1] != b[1]


def test_a_long_legend_makes_the_figure_higher_and_covers_nothing() -> None:
    figure, (axes,) = new_figure()
    high = figure.get_figheight()
    for i in range(12):
        axes.plot([0, 1], [0, i], label=f"a row with a long name, {i}", **look(i))
    legend_below(axes)
    assert figure.get_figheight() >= high + 12 / 2 * 0.2
    assert "a row with a long name" in svg(figure)
    assert figure.legends[0].get_window_extent().y1 < axes.get_window_extent().y0
