"""`dynamix report`: a run's page."""

from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import Json, guarded, print_json

Runs = Annotated[list[Path], typer.Argument(help="Run folders, or events files; several are compared.")]


@guarded
def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="File (default: report.html; several: comparison.html).")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page (default: the runs' names).")] = None,
    as_json: Json = False,
) -> None:
    """Make a web page of a run: batch sizes, where time went, decisions and their reasons. It opens offline."""
    from dynamix.errors import ConfigError
    from dynamix.telemetry import find_sources, page_data, write_page
    from dynamix.telemetry.sources import require_some

    sources = find_sources(runs)
    for source in sources:
        source.refresh()
    require_some(sources)
    if as_json:
        print_json(page_data(sources, title=title))
        return
    target = out or _default(*runs)
    try:
        data = write_page(sources, target, title=title)
    except OSError as error:
        fix = f"choose another by --out ({error.strerror})"
        raise ConfigError("out", str(target), "a file that can be written", fix) from error
    typer.echo(data["headline"])
    for said in data["missing"]:
        typer.echo(f"note: {said}", err=True)
    typer.echo(f"wrote {target}")


def _default(run: Path, *others: Path) -> Path:
    """report.html of a folder; a page with an events file's name. A page of several runs replaces that of none."""
    if others:
        return (run if run.is_dir() else run.parent) / "comparison.html"
    if run.is_dir():
        made_by_run = run / "report.html"  # the demo and the suites write their own, which must not be overwritten
        return run / "dynamix-report.html" if made_by_run.exists() and not _ours(made_by_run) else made_by_run
    return run.with_name(f"{run.stem}-report.html")


def _ours(page: Path) -> bool:
    try:
        return b'id="headline"' in page.read_bytes()[:100_000]
    except OSError:
        return False
