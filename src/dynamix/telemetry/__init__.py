"""Reads a run's files: pages, a live view, and exports.

    from dynamix.telemetry import find_sources, write_page

    sources = find_sources(["runs/emulate-20260101-120000"])
    for source in sources:
        source.refresh()                       # reads the file; a later call reads what was added since
    write_page(sources, "report.html")         # one self-contained file

Nothing here contacts the job: a run that is still being written can be read like an old one.
"""

from dynamix.telemetry.page import page_data, page_html, write_page
from dynamix.telemetry.run import RunView
from dynamix.telemetry.sources import RunSource, find_sources

__all__ = ["RunSource", "RunView", "find_sources", "page_data", "page_html", "write_page"]
