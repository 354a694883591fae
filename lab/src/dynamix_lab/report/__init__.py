"""Pages and tables of results.

    from dynamix_lab.report import Page, Section, Table, measured, new_figure, provenance

    figure, (axes,) = new_figure()
    axes.plot(times_s, accuracies)
    table = Table(["policy", "time to target, s"], [["static", "31.2"], ["dynamix", "24.9"]])
    page = Page(
        "dynamix demo",
        [Section("Accuracy against time", figure=figure, caption="One line a policy."), Section(table=table)],
        lead=[provenance(result)],
        details=measured(result),
    )
    path.write_text(page.html(), encoding="utf-8")     # one self-contained file
    table.markdown()                                   # the same rows for table.md and docs

`Table` holds text; `number`, `percent` and `with_interval` format its cells. `document` joins tables and paragraphs to
Markdown; `sections_markdown` writes sections without their figures. `COLOURS`, `look`, `dot` and `legend_below` give
plots the same style. The page escapes all text.
"""

from dynamix_lab.report.figures import COLOURS, dot, legend_below, look, new_figure, svg
from dynamix_lab.report.page import Page, Section, measured, provenance, sections_markdown
from dynamix_lab.report.tables import Table, document, number, percent, with_interval

__all__ = [
    "COLOURS",
    "Page",
    "Section",
    "Table",
    "document",
    "dot",
    "legend_below",
    "look",
    "measured",
    "new_figure",
    "number",
    "percent",
    "provenance",
    "sections_markdown",
    "svg",
    "with_interval",
]
