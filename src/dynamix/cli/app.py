"""The command line. Every command has --json (the result alone on stdout) and shows progress on stderr."""

from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.brought import add_commands_of_others
from dynamix.cli.compare import compare
from dynamix.cli.console import ANYTHING, Command, Json, Out, gone, guarded, print_json
from dynamix.cli.live import dashboard, watch
from dynamix.cli.policy import policy
from dynamix.cli.report import report

app = typer.Typer(
    name="dynamix",
    help="Adaptive per-worker batch sizes for synchronous data-parallel PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(policy, name="policy")
app.command()(report)
app.command()(watch)
app.command()(dashboard)
app.command()(compare)
app.command("exporter", hidden=True, context_settings=ANYTHING)(
    gone("python examples/exporter.py RUN..., in dynamix's source tree; it needs prometheus-client")
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dynamix {version('dynamix-train')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version.")] = False,
) -> None:
    pass


@app.command()
@guarded
def observe(
    command: Command = None,
    every: Annotated[float | None, typer.Option(min=1, help="Seconds between reports (default: one at end).")] = None,
    read: Annotated[Path | None, typer.Option(help="Start nothing; print the report of this run folder.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Say whether distributing a job pays, and which rank slows it: dynamix observe -- torchrun ... train.py."""
    from dynamix.observe.run import observe as run_observed
    from dynamix.observe.run import read as read_again
    from dynamix.observe.words import wrapped

    if read is not None:
        found = read_again(read)
        print_json(found) if as_json else typer.echo(wrapped(found["text"]), nl=False)
        return
    result = run_observed(command or [], out=out, every_s=every)
    if as_json:
        print_json(result)
    raise typer.Exit(int(result["exit_code"]))


@app.command()
@guarded
def doctor(as_json: Json = False) -> None:
    """Show what this machine offers, and how to enable what is missing."""
    from dynamix.cli.doctor import examine, in_a_line

    found = examine()
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    typer.echo(in_a_line(found["areas"]) + "\n")
    table = Table("", Column("what", overflow="fold"), Column("detail", overflow="fold"), show_edge=False)
    for area, entries in found["areas"].items():
        table.add_section()
        table.add_row("", Text(area, "bold"), "")
        for entry in entries:
            mark = Text("✓", "green") if entry["available"] else Text("–", "yellow")
            table.add_row(mark, Text(entry["name"]), Text(entry["detail"]))  # no markup: "[gpu]" is an extra
    Console().print(table)


add_commands_of_others(app)

if __name__ == "__main__":
    app()
