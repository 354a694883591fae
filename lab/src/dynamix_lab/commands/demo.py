"""`dynamix demo`."""

from __future__ import annotations

import functools
from typing import Annotated, Any, cast

import typer

from dynamix.cli.console import Json, Out, guarded
from dynamix_lab.commands.group import Mechanism, Resume, conducted, names_of
from dynamix_lab.installed import need_bench


@guarded
def demo(
    context: typer.Context,
    seeds: Annotated[int, typer.Option(help="Number of paired seeds; from 2 on there are ratios, with intervals.")] = 1,
    seed: Annotated[int, typer.Option(help="First seed of model and data.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: seconds a row, no meaningful times.")] = False,
    scenario: Annotated[str, typer.Option(help="Shipped scenario of device hosts, or YAML file.")] = "device-demo",
    rows: Annotated[
        str | None, typer.Option(help="Comma-separated: static, lb_bsp, balance, adapt, single (default: all).")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Policy file or name in place of dynamix.")] = None,
    mechanism: Mechanism = "auto",
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train one job on emulated devices of unlike speed, one way after the other, in three minutes."""
    need_bench("dynamix demo")
    from dynamix_lab.emulator.cluster import load_permitted
    from dynamix_lab.experiment.demo import DemoSuite, about_hosts, demo_plan

    plan = demo_plan(scenario=scenario, rows=names_of(rows), policy=policy, seeds=seeds, seed=seed, quick=quick)
    load_permitted(scenario, mechanism)
    say = functools.partial(typer.echo, err=True)
    suite = DemoSuite(plan, cast(Any, mechanism), say)
    result = conducted(context, suite, out=out, resume=resume, as_json=as_json)
    for line in (*plan.about[1:], about_hosts(result["mechanisms"])):
        say(line)
    if quick:
        say("this was a smoke run of a few steps: its times and scores mean nothing")
    if not all(all(row["arrived"]) for case in result["cases"] for row in case["rows"].values()):
        typer.echo("error: not every row reached its end", err=True)
        raise typer.Exit(1)
