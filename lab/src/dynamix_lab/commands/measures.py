"""Measurements of single things.

`dynamix bench overhead`, `observe`, `stepcount`, `lengths`, `disturbance`, `emulator-accuracy`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Resume, about, bench, conducted, floats_of, names_of, numbers_of, progress


@bench.command("overhead")
@guarded
def bench_overhead(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Two models, three launches of each.")] = False,
    step_ms: Annotated[
        str | None, typer.Option("--step-ms", help="Milliseconds a plain step, comma-separated (default: 2,22,131).")
    ] = None,
    launches: Annotated[int | None, typer.Option(help="Of each model.")] = None,
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
    policy: Annotated[str, typer.Option(help="That a promised gain is compared with.")] = "lb_bsp",
    blocks: Annotated[int, typer.Option(min=1, help="Pairs of blocks, observed and not.")] = 800,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Whether `dynamix observe` names the slow rank, says if distributing pays, keeps promises, and what it costs."""
    from dynamix_lab.suites.observe.suite import KINDS, ObservePlan, ObserveSuite

    plan = ObservePlan(names_of(only) or KINDS, cases, policy=policy, blocks=blocks)
    conducted(context, ObserveSuite(plan), out=out, resume=resume, as_json=as_json)


@bench.command("stepcount")
@guarded
def bench_stepcount(
    context: typer.Context,
    workloads: Annotated[list[str], typer.Argument(help="Workloads.")],
    rule: Annotated[
        str, typer.Option(help="best: the best learning rate at each batch; none, adascale: the workload's own, moved.")
    ] = "best",
    batches: Annotated[str | None, typer.Option(help="Global batches, comma-separated.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Samples after which a run is given up.")] = 200_000,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How many steps a task needs to its target at each global batch, and the critical batch."""
    from dynamix_lab.suites.stepcount import StepCountPlan, StepCountSuite

    plan = StepCountPlan(tuple(workloads), rule, numbers_of("batches", batches) or (), most)
    conducted(context, StepCountSuite(plan), out=out, resume=resume, as_json=as_json)


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


@bench.command("lengths")
@guarded
def bench_lengths(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A few clusters of 8 workers.")] = False,
    policies: Annotated[str | None, typer.Option(help="Comma-separated names, goodput among them.")] = None,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What it is worth to know what samples cost, on simulated clusters whose samples cost unlike much."""
    from dataclasses import replace

    from dynamix_lab.suites.lengths import LengthsPlan, LengthsSuite

    plan = LengthsPlan.of(quick=quick)
    chosen = names_of(policies)
    plan = plan if chosen is None else replace(plan, policies=chosen)
    conducted(context, LengthsSuite(plan), out=out, resume=resume, as_json=as_json)


@bench.command("emulator-accuracy")
@guarded
def bench_emulator_accuracy(
    context: typer.Context,
    only: Annotated[str | None, typer.Option(help="limits, pauses or devices (default: all).")] = None,
    as_json: Json = False,
) -> None:
    """How even work runs under the emulator's limits, what pauses do to processors, how device hosts keep time."""
    from dynamix_lab.suites.emulator_accuracy import measure_all, table

    with progress("emulator accuracy") as tell:
        result = {**about(context, "emulator"), **measure_all(only=only, tell=tell)}
    print_json(result) if as_json else typer.echo(table(result))
