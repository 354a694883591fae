"""`dynamix demo`."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from dynamix.cli.console import Json, Mechanism, Out, guarded, print_json
from dynamix_lab.commands.group import command_line


@guarded
def demo(
    context: typer.Context,
    seeds: Annotated[int, typer.Option(help="Number of paired seeds; 2 or more add an A/A pair and intervals.")] = 1,
    seed: Annotated[int, typer.Option(help="First seed of model and data.")] = 0,
    steps: Annotated[int | None, typer.Option(help="End every run after so many steps, not at the target.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: seconds per policy, no meaningful times.")] = False,
    scenario: Annotated[str, typer.Option(help="Shipped scenario or YAML file.")] = "demo",
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Also run exact shares from the scenario file (always with --seeds > 1)."),
    ] = False,
    policy_file: Annotated[str | None, typer.Option("--policy", help="Policy file or name to use as dynamix.")] = None,
    mechanism: Mechanism = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --out, without the seeds it finished.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a real model on an emulated uneven cluster under one policy after the other; table and report.html."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.demo.run import run_demo
    from dynamix_lab.harness.launch import POLICIES, LaunchSettings

    policies = POLICIES if reference or quick or seeds > 1 else tuple(name for name in POLICIES if name != "reference")
    settings = LaunchSettings(
        scenario=scenario,
        seeds=seeds,
        seed=seed,
        steps=steps,
        quick=quick,
        policies=policies,
        policy=policy_file,
        mechanism=cast(Any, mechanism),
        command=command_line(context),
    )
    settings.check()
    with RunFolder("demo", out, resume=resume) as folder:
        result, reached_end = run_demo(settings, folder)
    if as_json:
        print_json(result)
    if not reached_end:
        typer.echo("error: not every policy reached its end", err=True)
        raise typer.Exit(1)
