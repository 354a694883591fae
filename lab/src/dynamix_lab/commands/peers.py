"""`dynamix bench peers`: other libraries compared with dynamix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Mechanism, Resume, bench, command_line, names_of


@bench.command("peers")
@guarded
def bench_peers(
    context: typer.Context,
    scenario: Annotated[str, typer.Option(help="Shipped scenario or YAML file.")] = "steady-uneven",
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: 16 steps each, no meaningful times.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of paired seeds.")] = 1,
    seed: Annotated[int, typer.Option(help="First seed of model and data.")] = 0,
    peers: Annotated[
        str | None, typer.Option(help="Comma-separated, such as ddp,adaptdl-256,hivemind-local (default: all).")
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Every kind named by --peers (default: all) with 12 batches, rates and periods.")
    ] = False,
    workload: Annotated[
        str, typer.Option(help="What is trained; its layers and loss must be torch's own.")
    ] = "mnist1d",
    clock: Annotated[
        float | None, typer.Option(help="End every run after so many seconds instead of at the target.")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Of dynamix, beside them; static among them (default: static, three of dynamix).")
    ] = None,
    venvs: Annotated[
        Path | None, typer.Option(help="Folder of the peers' environments, made if missing (default: in the cache).")
    ] = None,
    again: Annotated[bool, typer.Option(help="Static once more at the end of each seed: the A/A pair.")] = True,
    mechanism: Mechanism = "auto",
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Plain DDP, AdaptDL, Hivemind and torchft, each in its own environment, beside dynamix on the same hosts."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.harness.display import Display
    from dynamix_lab.harness.suite import run_suite
    from dynamix_lab.peers.kinds import KINDS, PEERS, trials
    from dynamix_lab.peers.suite import POLICIES, PeersPlan, PeersSuite, prepared
    from dynamix_lab.tasks import make_workload

    named = tuple(dict.fromkeys(names_of(peers) or (KINDS if sweep else PEERS)))
    plan = PeersPlan(
        scenario=scenario,
        seeds=seeds,
        seed=seed,
        policies=names_of(policies) or POLICIES,
        peers=tuple(trial for kind in named for trial in trials(kind)) if sweep else named,
        venvs=venvs,
        quick=quick,
        again=again,
        workload=workload,
        clock_s=clock,
        mechanism=cast(Any, mechanism),
    )
    plan.check()
    settings = plan.settings()
    display = Display(target=settings.target(make_workload(settings.workload)))
    with RunFolder("peers", out, resume=resume) as folder:  # the runs show their own progress
        suite = PeersSuite(plan, folder, display, prepared(plan, display.say))
        result = run_suite(suite, folder, command=command_line(context))
        display.say(f"report: {folder.path / 'report.html'}")
    print_json(result) if as_json else typer.echo(suite.table(result))
    if not result["arrived"]:
        typer.echo("error: a peer failed, or a policy of dynamix did not reach its end", err=True)
        raise typer.Exit(1)
