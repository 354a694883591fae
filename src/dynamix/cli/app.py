"""The command line. Every command has --json (the result alone on stdout) and shows progress on stderr."""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamix.cli.console import Json, Mechanism, Out, guarded, print_json
from dynamix.cli.live import dashboard, exporter, watch
from dynamix.cli.policy import policy
from dynamix.cli.report import report
from dynamix.errors import ConfigError, UsageError

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
app.command()(exporter)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dynamix {version('dynamix-train')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


_SCHEMA = "Print the JSON schema of a scenario, and end."
_COMPARE = "Policies, or local, comma-separated: run the script once under each, and compare."
_THROTTLE = "Seconds until limits start; default: once all ranks hold a connection."


def _print_schema(wanted: bool) -> None:
    if wanted:
        from dynamix.emulator import scenario_schema

        print_json(scenario_schema())
        raise typer.Exit


@app.command(context_settings={"allow_extra_args": True})
@guarded
def emulate(
    context: typer.Context,
    scenario: Annotated[str, typer.Argument(help="Shipped scenario or YAML file.")],
    schema: Annotated[bool, typer.Option("--schema", is_eager=True, callback=_print_schema, help=_SCHEMA)] = False,
    seed: Annotated[int, typer.Option(help="Of the disturbance.")] = 0,
    throttle_after: Annotated[float | None, typer.Option(min=0, help=_THROTTLE)] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds until all is ended; default: none.")] = None,
    compare: Annotated[str | None, typer.Option(help=_COMPARE)] = None,
    mechanism: Mechanism = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run any training script on emulated hosts, one rank each: dynamix emulate demo -- python train.py."""
    from dynamix.cli.emulated import run_compared, run_once

    if not context.args:
        raise ConfigError("command", "", "a command after --", "dynamix emulate demo -- python train.py")
    options: dict[str, Any] = {"seed": seed, "out": out, "throttle_after_s": throttle_after, "timeout_s": timeout}
    options["mechanism"] = mechanism
    if compare is None:
        result = run_once(scenario, context.args, as_json=as_json, **options)
    else:
        result = run_compared(scenario, context.args, compare, as_json=as_json, **options)
    raise typer.Exit(int(result["exit_code"]))


@app.command(context_settings={"allow_extra_args": True})
@guarded
def observe(
    context: typer.Context,
    every: Annotated[float | None, typer.Option(min=1, help="Seconds between reports; default: at the end.")] = None,
    read: Annotated[Path | None, typer.Option(help="Only tell again what this run folder holds.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tell which rank holds an unchanged job back, and why: dynamix observe -- torchrun ... train.py."""
    from dynamix.observe.run import observe as run_observed
    from dynamix.observe.run import read as read_again

    if read is not None:
        found = read_again(read)
        print_json(found) if as_json else typer.echo(found["text"], nl=False)
        return
    result = run_observed(context.args, out=out, every_s=every)
    if as_json:
        print_json(result)
    raise typer.Exit(int(result["exit_code"]))


@app.command()
@guarded
def doctor(as_json: Json = False) -> None:
    """What this machine offers, and how to enable what is missing."""
    from dynamix.cli.doctor import examine

    found = examine()
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "detail", show_edge=False)
    for area, entries in found["areas"].items():
        table.add_section()
        table.add_row("", Text(area, "bold"), "")
        for entry in entries:
            mark = Text("✓", "green") if entry["available"] else Text("–", "yellow")
            table.add_row(mark, Text(entry["name"]), Text(entry["detail"]))  # no markup: "[emulator]" is an extra
    Console().print(table)


_LABORATORY = {
    "bench": "Measure dynamix itself.",
    "demo": "Train on an emulated uneven cluster under several policies.",
}


def _add_commands_of_others() -> None:
    """Add the commands that other distributions bring by entry point. A missing laboratory is named by its commands."""
    found = {entry.name: entry for entry in entry_points(group="dynamix.commands")}
    for name, entry in sorted(found.items()):
        command = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    for name, what in _LABORATORY.items():
        if name not in found:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, help=f"{what} Needs dynamix-lab.", context_settings=anything)(_missing(name))


def _missing(name: str) -> Callable[[], None]:
    @guarded
    def command() -> None:
        raise UsageError(f"dynamix {name} is part of the laboratory: pip install dynamix-lab (./lab in the repository)")

    return command


_add_commands_of_others()

if __name__ == "__main__":
    app()
