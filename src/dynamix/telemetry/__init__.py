"""Reads what a run wrote: pages, a live view, and exports.

    from dynamix.telemetry import find_sources, write_page

    sources = find_sources(["runs/emulate-20260101-120000"])
    for source in sources:
        source.refresh()                       # reads what is there; again later, it reads what came since
    write_page(sources, "report.html")         # one self-contained file

Nothing here talks to the job: a run that is still being written may be read as well as one of a year ago.
"""

from dynamix.telemetry.page import page_data, page_html, write_page
from dynamix.telemetry.run import RunView
from dynamix.telemetry.sources import RunSource, find_sources

__all__ = ["RunSource", "RunView", "find_sources", "page_data", "page_html", "write_page"]
