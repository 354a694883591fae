"""`dynamix demo`."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Mechanism, command_line, names_of
from dynamix_lab.installed import need_bench


@guarded
def demo(
    context: typer.Context,
    seeds: Annotated[int, typer.Option(help="Number of paired seeds; 2 or more add an A/A pair and intervals.")] = 1,
    seed: Annotated[int, typer.Option(help="First seed of model and data.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: seconds a row, no meaningful times.")] = False,
    scenario: Annotated[str, typer.Option(help="Shipped scenario of device hosts, or YAML file.")] = "device-demo",
    rows: Annotated[
        str | None, typer.Option(help="Comma-separated: single, static, lb_bsp, local, dynamix (default: all).")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Policy file or name for the row dynamix.")] = None,
    mechanism: Mechanism = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --out, without the seeds it finished.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train one job on emulated devices of unlike speed, one way after the other; table and report.html."""
    need_bench("dynamix demo")
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.demo.rows import TRIALS
    from dynamix_lab.demo.run import run_demo
    from dynamix_lab.demo.settings import DemoSettings

    settings = DemoSettings(
        scenario=scenario,
        seeds=seeds,
        seed=seed,
        quick=quick,
        rows=names_of(rows) or tuple(TRIALS),
        policy=policy,
        mechanism=cast(Any, mechanism),
        command=command_line(context),
    )
    settings.check()
    with RunFolder("demo", out, resume=resume) as folder:
        result, reached_end = run_demo(settings, folder)
    if as_json:
        print_json(result)
    if not reached_end:
        typer.echo("error: not every row reached its end", err=True)
        raise typer.Exit(1)
