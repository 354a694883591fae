"""Results as data: `dynamix bench record` stores one, `dynamix bench tables` writes its page and the docs' tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import Json, guarded, print_json
from dynamix_lab.commands.group import bench

Root = Annotated[Path, typer.Option(help="Root of the repository.")]


@bench.command("record")
@guarded
def bench_record(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    name: Annotated[str, typer.Option("--as", help="Name of the result; the date of the run is added.")],
    changed: Annotated[
        bool, typer.Option("--changed", help="Also from a source tree with changes that are in no commit.")
    ] = False,
    root: Root = Path(),
    as_json: Json = False,
) -> None:
    """Keep the result of a run in results/: result.json, the command that made it, and the machine."""
    from dynamix_lab.results.record import record

    made = record(folder, name, results=root / "results", changed=changed)
    print_json({"recorded": str(made)}) if as_json else typer.echo(f"recorded {made}; next: dynamix bench tables")


@bench.command("tables")
@guarded
def bench_tables(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 where a table differs.")] = False,
    root: Root = Path(),
    as_json: Json = False,
) -> None:
    """Write the page of each result, and the tables of README and docs."""
    from dynamix_lab.results.generated import changes

    found = dict(changes(root))
    if not check:
        for path, text in found.items():
            path.write_text(text, encoding="utf-8")
    names = [str(path.relative_to(root)) for path in found]
    said = "tables differ from results/" if check else "wrote"
    print_json({"changed": names}) if as_json else typer.echo(
        "\n".join(f"{said}: {name}" for name in names) or "up to date"
    )
    if check and names:
        raise typer.Exit(1)
