"""Self-contained pages: text, tables and plots in one HTML file that loads nothing from a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamix_lab.report.figures import svg
from dynamix_lab.report.tables import Table, document
from dynamix_lab.report.templates import rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DETAILS = (
    "command",
    "plan",
    "commit",
    "cluster",
    "mechanisms",
    "scenario",
    "scenario_sha256",
    "seeds",
    "order",
    "machine",
)


@dataclass(frozen=True)
class Section:
    """A part of a page, shown in the order of the fields. All text is plain; the page escapes it.

    text      paragraphs above the table
    figure    a matplotlib figure, drawn as SVG inside the page
    caption   text under the figure
    notes     smaller paragraphs
    links     text -> address, relative to the page
    """

    heading: str = ""
    text: Sequence[str] = ()
    table: Table | None = None
    figure: Figure | None = None
    caption: str = ""
    notes: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)

    def svg(self) -> str:
        """The figure's markup."""
        return "" if self.figure is None else svg(self.figure)


@dataclass(frozen=True)
class Page:
    """A page: title, paragraphs with its findings, sections, and at the end how it was measured.

    details   names and values for the last section; `measured` gives those of a result
    """

    title: str
    sections: Sequence[Section]
    lead: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def html(self) -> str:
        """The whole file."""
        return rendered("page.html", page=self)


def sections_markdown(sections: Sequence[Section]) -> str:
    """Sections without their figures as Markdown."""
    parts: list[Table | str] = []
    for section in sections:
        parts += [f"## {section.heading}"] if section.heading else []
        parts += [*section.text, *([section.table] if section.table else [])]
        parts += ["\n".join(f"- {note}" for note in section.notes)] if section.notes else []
    return document(*parts)


def measured(result: Mapping[str, Any]) -> dict[str, str]:
    """The `details` of a page about `result`: command, commit, cluster, seeds, machine and other facts that affect its
    figures.
    """
    known = {name: result[name] for name in DETAILS if result.get(name) is not None}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in known.items()}


def provenance(result: Mapping[str, Any]) -> str:
    """One sentence for the top of a page: cluster, machine, commit and seeds of a result."""
    known = result["machine"]
    seeds = ", ".join(map(str, result["seeds"]))
    where = f"Cluster: {result['cluster']}, one machine ({known['cores']} cores, {known['cpu']})"
    return f"{where}. Commit {result['commit'] or 'unknown'}, seeds {seeds}."
