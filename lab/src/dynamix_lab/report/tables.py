"""Tables of results, as Markdown and as HTML from the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamix_lab.report.templates import rendered

_LONG = 30  # characters; a longer cell is text, which wraps


@dataclass(frozen=True)
class Table:
    """Text in rows and columns. Numbers keep the digits that their writer gave them.

    head   names of the columns
    rows   as many cells each

    >>> print(Table(["policy", "time"], [["static", "1.00"], ["dbs", "0.81"]]).markdown(), end="")
    | policy | time |
    |---|---|
    | static | 1.00 |
    | dbs | 0.81 |
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown, ending with a line break. A bar in a cell is escaped."""
        return rendered("table.md", table=self)

    def html(self) -> str:
        """The table as HTML. Ratios come first, so that a narrow screen shows them; long text comes last."""
        long = {at for at in range(1, len(self.head)) if any(len(row[at]) > _LONG for row in self.rows)}
        other = [not name.startswith("over ") for name in self.head]
        order = sorted(range(len(self.head)), key=lambda at: (at > 0, at in long, other[at]))
        return rendered("table.html", table=self, order=order, long=long)


def document(*parts: Table | str) -> str:
    """Markdown of tables and paragraphs, with an empty line between them."""
    return "\n".join(part.markdown() if isinstance(part, Table) else f"{part.rstrip()}\n" for part in parts)


def number(value: float | None, digits: int) -> str:
    """A number with `digits` after the point; an en dash if there is none.

    >>> number(0.5, 2), number(None, 2), number(float("nan"), 2)
    ('0.50', '–', '–')
    """
    return "–" if value is None or value - value != 0 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A fraction as a whole percentage.

    >>> percent(0.256), percent(None)
    ('26 %', '–')
    """
    return "–" if value is None or value - value != 0 else f"{100 * value:.0f} %"


def with_interval(ratio: Mapping[str, Any], digits: int = 3) -> str:
    """A ratio from `paired_ratio`, with its interval if there is one.

    >>> with_interval({"median": 0.8, "low": 0.75, "high": 0.85})
    '0.800 (0.750-0.850)'
    >>> with_interval({"median": 0.8, "low": None, "high": None})
    '0.800'
    """
    said = number(ratio.get("median"), digits)
    if ratio.get("low") is None or ratio.get("high") is None:
        return said
    return f"{said} ({ratio['low']:.{digits}f}-{ratio['high']:.{digits}f})"
