"""`dynamix bench experiment NAME`: a shipped experiment, or one from your file."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, guarded
from dynamix_lab.commands.group import EXPERIMENTS, Resume, bench, conducted, names_of


def _begins(name: str) -> str:
    """The comment at the beginning of a file."""
    lines = EXPERIMENTS[name].read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))


_HELP = [
    "An experiment: rows at places with seeds, by its name or from a file. `bench NAME` is short for `bench experiment "
    "NAME`.",
    *(f"{name}: {_begins(name)}" for name in EXPERIMENTS),
]


@bench.command("experiment", help="\n\n".join(_HELP), short_help=f"An experiment: {', '.join(EXPERIMENTS)}, or yours.")
@guarded
def bench_experiment(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A name, or a TOML file as those in lab/src/dynamix_lab/experiments.")],
    places: Annotated[str | None, typer.Option(help="Scenario/job, comma-separated (default: all).")] = None,
    rows: Annotated[str | None, typer.Option(help="Rows, separated by semicolons (default: all).")] = None,
    settings: Annotated[str | None, typer.Option(help="Settings to run, comma-separated (default: all).")] = None,
    batches: Annotated[str | None, typer.Option(help="Batches of the recipes, comma-separated (default: all).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, paired (default: the experiment's).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One place, the first three rows, one seed: a smoke run.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes that play cells of the virtual clock.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    from dynamix.errors import ConfigError
    from dynamix_lab.experiment.experiment import load
    from dynamix_lab.experiment.suite import ExperimentSuite

    chosen = load(name).only(
        places=names_of(places),
        rows=None if rows is None else tuple(row.strip() for row in rows.split(";")),
        settings=names_of(settings),
        batches=names_of(batches),
    )
    if seeds is not None:
        chosen = replace(chosen, seeds=seeds)
    if quick:
        whole, chosen = chosen, chosen.smoke()
        left = {what: whole.names_in(what)[len(chosen.names_in(what)) :] for what in ("rows", "places")}
        said = ", and the ".join(f"{what} {'; '.join(names)}" for what, names in left.items() if names)
        typer.echo(f"quick: one setting, batch and seed{said and f', without the {said}'}", err=True)
    if processes > 1 and chosen.cluster != "virtual":
        raise ConfigError("processes", processes, "1, as the machine is the cluster", "leave --processes out")
    conducted(context, ExperimentSuite(chosen), out=out, resume=resume, as_json=as_json, processes=processes)
