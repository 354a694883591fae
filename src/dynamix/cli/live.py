"""`dynamix watch` and `dynamix dashboard`: runs in progress."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import guarded, read_token
from dynamix.cli.report import Runs
from dynamix.errors import ConfigError, UsageError
from dynamix.plugins import how_to_install


@guarded
def dashboard(
    runs: Runs,
    host: Annotated[str, typer.Option(help="Address; any but loopback needs a token and a certificate.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8642,
    token_file: Annotated[Path | None, typer.Option(help="File with the secret that visitors send as ?token=.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file, to serve over TLS.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key.")] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two reads of the files.")] = 1.0,
) -> None:
    """Serve the page of running jobs, and keep it up to date, until Ctrl-C. It only reads their files."""
    from dynamix.telemetry import find_sources

    try:
        from dynamix.telemetry.dashboard import LiveRuns, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        raise UsageError(f"the dashboard needs {error.name}: {how_to_install('dashboard')}") from error
    token = read_token(token_file)
    for file in (certificate, key):
        if file is not None and not file.is_file():
            raise ConfigError("key" if file is key else "certificate", str(file), "a PEM file", "check the path")
    live = LiveRuns(find_sources(runs), every_s=every)
    serve(live, host=host, port=port, token=token, certificate=certificate, key=key, tell=_tell)


@guarded
def watch(
    run: Annotated[Path, typer.Argument(help="A run folder, or an events file.")],
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two reads of the file.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
) -> None:
    """Show a run in the terminal while it goes on: sizes, where time goes, what happens. Ctrl-C leaves it running.

    If stdout is no terminal, it prints once, and ends.
    """
    from rich.console import Console
    from rich.live import Live

    from dynamix.cli.watch_view import view_of
    from dynamix.telemetry import find_sources

    sources = find_sources([run])
    console = Console(highlight=False)
    for source in sources:
        source.refresh()
    if once or not sys.stdout.isatty():
        console.print(view_of(sources))
        return
    live = Live(view_of(sources), console=console, auto_refresh=False, screen=False)
    with contextlib.suppress(KeyboardInterrupt), live as shown:
        while not all(source.ended for source in sources):
            time.sleep(every)
            for source in sources:
                source.refresh()
            shown.update(view_of(sources), refresh=True)


def _tell(address: str) -> None:
    typer.echo(f"dashboard: {address} (Ctrl-C ends it)")
    sys.stdout.flush()
