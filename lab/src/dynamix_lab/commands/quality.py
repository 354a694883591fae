"""`dynamix bench quality`, `rounds`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Resume, bench, command_line, conducted, names_of, progress


@bench.command("quality")
@guarded
def bench_quality(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="One job, three rows, two short pairs: a smoke run.")] = False,
    jobs: Annotated[str | None, typer.Option(help="Jobs, comma-separated (default: all six).")] = None,
    rows: Annotated[str | None, typer.Option(help="Rows, comma-separated, static among them (default: all).")] = None,
    sized: Annotated[
        str | None,
        typer.Option(help="Rows that get pairs until their interval is narrow (default: dynamix,dynamix-fixed)."),
    ] = None,
    pilot: Annotated[int | None, typer.Option(min=2, help="Pairs of every row (default: 8).")] = None,
    max_pairs: Annotated[int | None, typer.Option(min=2, help="No row gets more (default: 40).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first pair.")] = 0,
    scenario: Annotated[str | None, typer.Option(help="Of device hosts (default: device-demo).")] = None,
    rate_factor: Annotated[float, typer.Option(help="Times the learning rates, of every row alike.")] = 1.0,
    schedule: Annotated[str, typer.Option(help="Of the learning rate: cosine, steps, constant.")] = "cosine",
    equal_time: Annotated[
        bool, typer.Option("--equal-time", help="Every row also trains for as long as even shares take.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="That play runs.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Held-out accuracy and cross-entropy at equal samples: dynamix beside even shares, with and without batch norm."""
    from dataclasses import replace

    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.report import sections_markdown
    from dynamix_lab.suites.quality import pages
    from dynamix_lab.suites.quality.plan import QualityPlan
    from dynamix_lab.suites.quality.suite import run_in_stages

    given: dict[str, Any] = {
        **{"jobs": names_of(jobs), "rows": names_of(rows), "sized": names_of(sized)},
        **{"pilot": pilot, "max_pairs": max_pairs, "scenario": scenario},
    }
    plan = replace(
        QualityPlan.quick() if quick else QualityPlan(),
        seed=seed,
        rate_factor=rate_factor,
        schedule=schedule,
        equal_time=equal_time,
        **{name: value for name, value in given.items() if value is not None},
    )
    plan.check()
    with RunFolder("quality", out, resume=resume) as folder, progress("quality") as tell:
        result = run_in_stages(plan, folder, command=command_line(context), tell=tell, processes=processes)
    print_json(result) if as_json else typer.echo(sections_markdown(pages.sections(result)))


@bench.command("rounds")
@guarded
def bench_rounds(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="One job, one seed.")] = False,
    jobs: Annotated[str | None, typer.Option(help="Jobs, separated by semicolons (default: all).")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Fresh seeds for each row's winner.")] = 2,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How often workers meet: the rule against every fixed number of steps, AdaComm, QSR and plain training."""
    from dynamix_lab.suites.rounds.jobs import JOBS
    from dynamix_lab.suites.rounds.suite import RoundsPlan, RoundsSuite

    named = tuple(name.strip() for name in jobs.split(";")) if jobs is not None else tuple(JOBS)
    plan = RoundsPlan(named[:1], 1) if quick else RoundsPlan(named, seeds)
    conducted(context, RoundsSuite(plan), out=out, resume=resume, as_json=as_json)
