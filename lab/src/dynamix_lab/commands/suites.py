"""The suites `dynamix bench overhead`, `observe`, `compression`, `faults`, `fuzz`, and in the simulator `stigmergy` and
`disturbance`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Resume, about, bench, conducted, floats_of, names_of, numbers_of

_JOBS = "ratings, ncf, ncf-20m, lstm-tied, transformer-tied, moe, lora, vgg-topk, bert-topk, rows-0, rows-50, rows-100"


@bench.command("overhead")
@guarded
def bench_overhead(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Two models, three launches of each.")] = False,
    step_ms: Annotated[
        str | None, typer.Option("--step-ms", help="Milliseconds a plain step, comma-separated (default: 2,22,131).")
    ] = None,
    launches: Annotated[int | None, typer.Option(help="Launches of each model.")] = None,
    decision_only: Annotated[bool, typer.Option("--decision-only", help="Only the decision and its line.")] = False,
    policies: Annotated[str | None, typer.Option(help="Whose decisions to time (default: dynamix,goodput).")] = None,
    workers: Annotated[str | None, typer.Option(help="Workers decided for (default: 4,64,1024).")] = None,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Job time and processor time beside plain DDP, two ranks; processor time of a decision with its events line."""
    from dynamix.policies import make_policy
    from dynamix_lab.report import sections_markdown
    from dynamix_lab.suites.overhead.suite import OverheadPlan, OverheadSuite, decisions, sections

    chosen = {"deciders": names_of(policies), "workers": numbers_of("workers", workers)}
    if not decision_only:
        sizes = {"step_ms": floats_of("step_ms", step_ms), "launches": launches}
        plan = OverheadPlan.of(quick=quick, **chosen, **sizes)
        conducted(context, OverheadSuite(plan), out=out, resume=resume, as_json=as_json)
        return
    plan = OverheadPlan.of(quick=quick, **chosen)
    for name in plan.deciders:
        make_policy(name)
    found = decisions(plan.deciders, workers=plan.workers, count=plan.decisions)
    result = {**about(context, "simulator"), **found}
    print_json(result) if as_json else typer.echo(sections_markdown(sections(result)))


@bench.command("observe")
@guarded
def bench_observe(
    context: typer.Context,
    only: Annotated[str | None, typer.Option(help="cases, pays, gains, overhead; comma-separated.")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Injected slow ranks.")] = 20,
    policy: Annotated[str, typer.Option(help="Policy whose gain is compared with the promise.")] = "lb_bsp",
    blocks: Annotated[int, typer.Option(min=1, help="Pairs of blocks, observed and not.")] = 800,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Whether `dynamix observe` names the slow rank, says if distributing pays, keeps promises, and what it costs."""
    from dynamix_lab.suites.observe.suite import KINDS, ObservePlan, ObserveSuite

    plan = ObservePlan(names_of(only) or KINDS, cases, policy=policy, blocks=blocks)
    conducted(context, ObserveSuite(plan), out=out, resume=resume, as_json=as_json)


@bench.command("disturbance")
@guarded
def bench_disturbance(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A few short trainings of 4 workers.")] = False,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How much of a static job's time policies cut under the DBS paper's own disturbance, on simulated clusters."""
    from dynamix_lab.suites.disturbance import DisturbancePlan, DisturbanceSuite

    conducted(context, DisturbanceSuite(DisturbancePlan.of(quick=quick)), out=out, resume=resume, as_json=as_json)


@bench.command("compression")
@guarded
def bench_compression(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Two workloads, four hosts, 100 Mbit/s.")] = False,
    workloads: Annotated[str | None, typer.Option(help=f"Comma-separated: {_JOBS} (default: all).")] = None,
    rates: Annotated[str | None, typer.Option(help="Link rates, Mbit/s, comma-separated (default: 100,1000).")] = None,
    workers: Annotated[str | None, typer.Option(help="Hosts, comma-separated (default: 4,8).")] = None,
    ways: Annotated[
        str | None, typer.Option(help="Comma-separated, dense,dense-again among them (default: all).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each way in a cell (default: 3).")] = None,
    steps: Annotated[int | None, typer.Option(help="Timed steps a turn, at least (default: 3, quick 4).")] = None,
    turn_s: Annotated[
        float | None, typer.Option(help="Seconds that a turn's timed steps last, at least (default: 0.5); 0: no more.")
    ] = None,
    identity_steps: Annotated[int, typer.Option(max=0, hidden=True)] = 0,  # the recorded command omits these
    seed: Annotated[int, typer.Option(help="Seed of weights, data and the order of turns.")] = 0,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Gradient exchanges side by side on emulated hosts with shaped links: time and bytes."""
    from dynamix_lab.suites.compression.suite import CompressionPlan, CompressionSuite

    plan = CompressionPlan.of(
        quick=quick,
        jobs=names_of(workloads),
        rates_mbit_s=numbers_of("rates", rates),
        workers=numbers_of("workers", workers),
        ways=names_of(ways),
        rounds=rounds,
        steps=steps,
        turn_s=turn_s,
        seed=seed,
    )
    conducted(context, CompressionSuite(plan), out=out, resume=resume, as_json=as_json)


@bench.command("stigmergy")
@guarded
def bench_stigmergy(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="About two minutes: to 32 workers, one seed.")] = False,
    scenarios: Annotated[str | None, typer.Option(help="Comma-separated (default: all).")] = None,
    workers: Annotated[str | None, typer.Option(help="Comma-separated (default: 4,8,32,1024; quick 4,8,32).")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that play cells.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Workers that decide for themselves against central policies, with failures and ablations, in the simulator."""
    from dataclasses import replace

    from dynamix_lab.suites.stigmergy.suite import StigmergyPlan, StigmergySuite

    plan = StigmergyPlan.of(quick=quick)
    if scenarios:
        plan = replace(plan, scenarios=tuple(scenarios.split(",")))
    if workers:
        plan = replace(plan, workers=numbers_of("workers", workers) or ())
    conducted(context, StigmergySuite(plan), out=out, resume=resume, as_json=as_json, processes=processes)


@bench.command("faults")
@guarded
def bench_faults(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Three faults, a short job: two to four minutes.")] = False,
    faults: Annotated[str | None, typer.Option(help="Kinds of faults, comma-separated (default: all).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Faults of each kind (default: 200 in all).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Processes, each with its own hosts.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Break a job on emulated hosts in every way; check what ended, who was named, and every sample and gradient."""
    from dynamix_lab.suites.faults.suite import FaultsPlan, FaultsSuite

    plan = FaultsPlan.of(quick=quick, faults=names_of(faults), seeds=seeds, seed=seed)
    result = conducted(context, FaultsSuite(plan), out=out, resume=resume, as_json=as_json, processes=processes)
    if result["right"] < result["injected"]:
        typer.echo("error: not every fault was handled correctly", err=True)
        raise typer.Exit(1)


@bench.command("fuzz")
@guarded
def bench_fuzz(
    context: typer.Context,
    kinds: Annotated[str | None, typer.Option(help="Kinds of input, comma-separated (default: all).")] = None,
    inputs: Annotated[int, typer.Option(min=1, help="Inputs of each kind.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the damage.")] = 0,
    guided: Annotated[bool, typer.Option("--guided", help="Choose inputs by code coverage (extra fuzz).")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes that try inputs.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Damage states, files and an aggregator's frames: each gives an error of dynamix, or loads completely."""
    from dynamix_lab.suites.fuzz.suite import FuzzPlan, FuzzSuite

    plan = FuzzPlan.of(kinds=names_of(kinds), inputs=inputs, seed=seed, guided=guided)
    result = conducted(context, FuzzSuite(plan), out=out, resume=resume, as_json=as_json, processes=processes)
    if any(told["escapes"] for told in result["kinds"].values()):
        typer.echo("error: some inputs gave an error that is not dynamix's, or another state", err=True)
        raise typer.Exit(1)
