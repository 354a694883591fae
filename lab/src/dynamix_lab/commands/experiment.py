"""`dynamix bench NAME` for every experiment that the laboratory comes with, and `dynamix bench experiment FILE`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, guarded
from dynamix_lab.commands.group import Resume, bench, conducted, names_of

FILES = Path(__file__).parents[1] / "experiments"

Places = Annotated[str | None, typer.Option(help="Scenario/job, comma-separated (default: the experiment's).")]
Rows = Annotated[str | None, typer.Option(help="Rows, separated by semicolons (default: all).")]
Settings = Annotated[str | None, typer.Option(help="Of the experiment's settings, comma-separated (default: all).")]
Batches = Annotated[str | None, typer.Option(help="Of the recipes' batches, comma-separated (default: all).")]
Seeds = Annotated[int | None, typer.Option(min=1, help="How many seeds, paired (default: the experiment's).")]
Quick = Annotated[bool, typer.Option("--quick", help="One place, the first three rows, one seed: a smoke run.")]
Processes = Annotated[int, typer.Option(min=1, help="That play cells of the virtual clock.")]


def _run(context: typer.Context, name: str) -> None:
    """Load an experiment, narrow it by the options that the command was called with, and run it."""
    from dynamix.errors import ConfigError
    from dynamix_lab.experiment.experiment import load
    from dynamix_lab.experiment.suite import ExperimentSuite

    given = context.params
    wanted = {name: names_of(given[name]) for name in ("places", "settings", "batches")}
    wanted["rows"] = None if given["rows"] is None else tuple(row.strip() for row in given["rows"].split(";"))
    chosen = load(name).only(**wanted)
    if given["seeds"] is not None:
        chosen = dataclasses.replace(chosen, seeds=given["seeds"])
    if given["quick"]:
        chosen = chosen.smoke()
    processes = given["processes"]
    if processes > 1 and chosen.cluster != "virtual":
        raise ConfigError("processes", processes, "1, as the machine is the cluster", "leave --processes out")
    how = {name: given[name] for name in ("out", "resume", "as_json")}
    conducted(context, ExperimentSuite(chosen), processes=processes, **how)


@bench.command("experiment")
@guarded
def bench_experiment(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="A TOML file, made as those in lab/src/dynamix_lab/experiments are.")],
    places: Places = None,
    rows: Rows = None,
    settings: Settings = None,
    batches: Batches = None,
    seeds: Seeds = None,
    quick: Quick = False,
    processes: Processes = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """An experiment of your own: rows at places with seeds, from a file."""
    _run(context, file)


def _add(name: str) -> None:
    @bench.command(name, help=_first_lines(FILES / f"{name}.toml"))
    @guarded
    def command(
        context: typer.Context,
        places: Places = None,
        rows: Rows = None,
        settings: Settings = None,
        batches: Batches = None,
        seeds: Seeds = None,
        quick: Quick = False,
        processes: Processes = 1,
        resume: Resume = False,
        out: Out = None,
        as_json: Json = False,
    ) -> None:
        _run(context, name)


def _first_lines(path: Path) -> str:
    """The comment that a file begins with: the help of its command."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


for _path in sorted(FILES.glob("*.toml")):
    _add(_path.stem)
