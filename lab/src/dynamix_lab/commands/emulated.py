"""`dynamix emulate`: a run or a comparison on emulated hosts, and its report page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamix.cli.console import Command, Json, Out, guarded, print_json
from dynamix_lab.commands.group import Mechanism

emulate = typer.Typer()

_SCHEMA = "Print the JSON schema of a scenario, and end."
_COMPARE = "Policies (NAME[:adaptive][:auto]), or local, comma-separated: run the script under each, and compare."
_THROTTLE = "Seconds until limits start (default: when all ranks are connected)."


def _print_schema(wanted: bool) -> None:
    if wanted:
        from dynamix_lab.emulator import scenario_schema

        print_json(scenario_schema())
        raise typer.Exit


@emulate.command()
@guarded
def _emulate(
    scenario: Annotated[str, typer.Argument(help="Shipped scenario or YAML file.")],
    command: Command = None,
    schema: Annotated[bool, typer.Option("--schema", is_eager=True, callback=_print_schema, help=_SCHEMA)] = False,
    seed: Annotated[int, typer.Option(help="Seed of the disturbance.")] = 0,
    throttle_after: Annotated[float | None, typer.Option(min=0, help=_THROTTLE)] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds until all is ended (default: never).")] = None,
    compare: Annotated[str | None, typer.Option(help=_COMPARE)] = None,
    mechanism: Mechanism = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run any training script on emulated hosts, one rank each: dynamix emulate demo -- python train.py.

    It starts one rank on each host itself, so the command has no launcher such as torchrun.
    """
    options: dict[str, Any] = {"seed": seed, "out": out, "throttle_after_s": throttle_after, "timeout_s": timeout}
    options["mechanism"] = mechanism
    if compare is None:
        result = run_once(scenario, command or [], as_json=as_json, **options)
    else:
        result = run_compared(scenario, command or [], compare, as_json=as_json, **options)
    raise typer.Exit(int(result["exit_code"]))


def run_once(scenario: str, command: Sequence[str], *, as_json: bool, **options: Any) -> dict[str, Any]:
    """Make one run and return its result."""
    from dynamix_lab.emulator.run import emulate, summary

    result = emulate(scenario, command, **options)
    data = _page(Path(result["folder"]))
    if as_json:
        print_json(result)
    else:
        _say(data, Path(result["folder"]))
        typer.echo(summary(result))
    return result


def run_compared(
    scenario: str, command: Sequence[str], compared: str, *, as_json: bool, **options: Any
) -> dict[str, Any]:
    """Make a run under each policy, print the table and the page's path. Returns the comparison's result."""
    from dynamix.policies import make_policy
    from dynamix_lab.emulator.compare import compare, rows_of

    rows = rows_of(compared)
    for row in rows:
        make_policy(row.policy)  # rejects a wrong name before any run
    result = compare(scenario, command, rows, tell=lambda name: typer.echo(f"--- {name}", err=True), **options)
    folder = Path(result["folder"])
    data = _page(folder)
    if as_json:
        print_json(result)
        return result
    if data is None:
        for name, done in result["rows"].items():
            why = done["available"] if isinstance(done["available"], str) else f"exit code {done['exit_code']}"
            typer.echo(f"{name}: {why}")
    elif data["comparison"]:
        _print_table(data)
    _say(data, folder)
    late = [name for name, done in result["rows"].items() if done.get("ended_by_timeout_s") is not None]
    ended = f"ended by --timeout: {', '.join(late)}; " if late else ""
    held = ", report.html" if data is not None else ""
    typer.echo(f"{ended}{folder} holds run.json, result.json{held} and a run folder for each row")
    return result


def _page(folder: Path) -> dict[str, Any] | None:
    """Write report.html of a run folder. Returns its data, or None if there is no window or no room for the page."""
    from dynamix.telemetry import find_sources, write_page

    if not _has_events(folder):
        return None
    sources = find_sources([folder])
    for source in sources:
        source.refresh()
    if not any(source.views for source in sources):
        return None
    try:
        return write_page(sources, folder / "report.html")
    except OSError as error:  # a missing page must not change how the run ended
        typer.echo(f"note: {folder / 'report.html'} could not be written ({error.strerror or error})", err=True)
        return None


def _has_events(folder: Path) -> bool:
    return any(folder.glob("events.jsonl")) or any(folder.glob("*/events.jsonl"))


def _say(data: dict[str, Any] | None, folder: Path) -> None:
    if data is None:
        failed = "no window could be read, or the page could not be written"
        absent = "no Controller wrote events, which is normal under observe"
        typer.echo(f"There is no page: {failed if _has_events(folder) else absent}.")
        return
    for said in data["missing"]:
        typer.echo(f"note: {said}", err=True)
    typer.echo(data["headline"])


def _print_table(data: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    from dynamix.cli.policy_pages import columns_table
    from dynamix.telemetry.comparing import table

    console = Console(highlight=False)
    heads, *rows = table(data["comparison"])
    shown = columns_table(*heads)
    for row in rows:
        shown.add_row(*[Text(cell) for cell in row])
    console.print(shown)
    for said in data["comparison"]["notes"]:
        console.print(Text(said))
    for row in data["comparison"]["absent"]:
        console.print(Text(f"{row['name']}: {row['why']}"))
