"""`dynamix bench opponents`, `rounds`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, guarded
from dynamix_lab.commands.group import Resume, bench, conducted, names_of


@bench.command("opponents")
@guarded
def bench_opponents(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="One place, three rows, nothing tuned: a smoke run.")] = False,
    places: Annotated[
        str | None, typer.Option(help="Scenario/workload, comma-separated (default: the scenarios of device hosts).")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="Rows of the table, comma-separated (default: all usual ones).")
    ] = None,
    regimes: Annotated[
        bool, typer.Option("--regimes", help="24 made-up clusters instead: who wins where, six rows.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Fresh pairs for each row's winner.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="First of them.")] = 0,
    held: Annotated[
        Path | None,
        typer.Option(help="Tune nothing: rows are what this finished virtual run's result.json was tuned to."),
    ] = None,
    tune: Annotated[str | None, typer.Option(help="With --held: rows that are tuned all the same.")] = None,
    tuned_at: Annotated[
        str | None, typer.Option(help="With --held: all places take what rows were tuned to at this one.")
    ] = None,
    live: Annotated[
        Path | None,
        typer.Option(help="Run live on emulated hosts what this finished virtual run's result.json was tuned to."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=5.0, help="Clock time of each live run.")] = 25.0,
    processes: Annotated[int, typer.Option(min=1, help="That play cells of the virtual clock.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What a practitioner would pick, tuned as well as ours: one worker alone, static, profiled, local SGD and more."""
    from dynamix_lab.suites.opponents.live import LivePlan, LiveSuite
    from dynamix_lab.suites.opponents.places import V2
    from dynamix_lab.suites.opponents.plan import REGIME_ROWS, USUAL
    from dynamix_lab.suites.opponents.regimes import regime_places
    from dynamix_lab.suites.opponents.virtual import OpponentsPlan, OpponentsSuite

    if live is not None:
        live_plan = LivePlan.of(
            live, places=names_of(places), rows=names_of(rows), seeds=seeds, seed=seed, time_s=seconds
        )
        conducted(context, LiveSuite(live_plan), out=out, resume=resume, as_json=as_json)
        return
    if quick:
        plan = OpponentsPlan(("device-even/teacher",), ("single", "static", "local"), seeds=1, seed=seed, tuning=())
    elif regimes:
        plan = OpponentsPlan(names_of(places) or regime_places(), names_of(rows) or REGIME_ROWS, seeds, seed)
    else:
        plan = OpponentsPlan(names_of(places) or V2, names_of(rows) or USUAL, seeds, seed)
    if held is not None:
        plan = dataclasses.replace(plan, held=str(held), tuned=names_of(tune) or ())
    if tuned_at is not None:
        plan = dataclasses.replace(plan, tuned_at=tuned_at)
    conducted(context, OpponentsSuite(plan), out=out, resume=resume, as_json=as_json, processes=processes)


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
