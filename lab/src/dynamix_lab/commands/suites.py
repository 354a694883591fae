"""The suites of whole jobs: `dynamix bench scaling`, `reaction`, `stigmergy`, `workloads`..."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Policies, Resume, bench, conducted, names_of, numbers_of

if TYPE_CHECKING:
    from dynamix_lab.harness.suite import Suite


FamiliesFrom = Annotated[
    str | None,
    typer.Option(
        "--families-from",
        metavar="MODULE:FUNCTION",
        help="Simulated families of your own instead: the function gives {name: sampler(count, workers, seed)}.",
    ),
]


@bench.command("scaling")
@guarded
def bench_scaling(
    context: typer.Context,
    cluster: Annotated[
        str, typer.Option(help="simulator (2 to 1,024 workers), or virtual (real training at 8, 16 and 32).")
    ] = "simulator",
    quick: Annotated[bool, typer.Option("--quick", help="To 128 workers; virtual: a small net at 8.")] = False,
    workers: Annotated[str | None, typer.Option(help="Of virtual's 8,16,32, comma-separated (default: all).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Pairs of virtual (default: 3).")] = None,
    cases: Annotated[
        str | None, typer.Option(help="Of virtual's vgg16-sgd,vgg11-sgd,vgg11-adam (default: all).")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=600, help="Of a run of virtual; longer runs converge.")] = None,
    families_from: FamiliesFrom = None,
    policies: Policies = None,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Many workers: simulated ones under frequent slowdowns, or the DYNAMIX paper's tables on the virtual clock."""
    from dynamix.errors import ConfigError
    from dynamix_lab.suites.scaling.suite import ScalingPlan, ScalingSuite
    from dynamix_lab.suites.simulated import SimulatedSuite, scaling_plan

    suite: Suite
    if cluster == "virtual":
        if families_from:
            raise ConfigError("--families-from", families_from, "with --cluster simulator", "leave one of them out")
        plan = ScalingPlan.of(
            quick=quick,
            policies=names_of(policies),
            workers=numbers_of("workers", workers),
            seeds=seeds,
            cases=names_of(cases),
            samples=samples,
        )
        suite = ScalingSuite(plan)
        conducted(context, suite, out=out, resume=resume, as_json=as_json)
        return
    if cluster != "simulator" or workers or seeds or cases or samples:
        given = cluster if cluster != "simulator" else f"simulator with {workers=}, {seeds=}, {cases=}, {samples=}"
        raise ConfigError("cluster", given, "simulator, or virtual with these options", "choose one of them")
    simulated = scaling_plan(quick=quick, policies=names_of(policies), families_from=families_from)
    suite = SimulatedSuite(simulated, name="scaling")
    conducted(context, suite, out=out, resume=resume, as_json=as_json)


@bench.command("reaction")
@guarded
def bench_reaction(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Three families at 8 workers, the goodput rule.")] = False,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Windows of fixed lengths beside windows whose length follows what changes, on simulated clusters."""
    from dynamix_lab.suites.reaction import ReactionPlan, ReactionSuite

    conducted(context, ReactionSuite(ReactionPlan.of(quick=quick)), out=out, resume=resume, as_json=as_json)


@bench.command("fidelity")
@guarded
def bench_fidelity(as_json: Json = False) -> None:
    """Errors of the simulator on measurements that its fits have not seen."""
    from dynamix_lab.suites.fidelity.suite import lines, run_fidelity

    result = run_fidelity()
    print_json(result) if as_json else typer.echo("\n".join(lines(result)))


@bench.command("stigmergy")
@guarded
def bench_stigmergy(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="About two minutes: to 32 workers, one seed.")] = False,
    scenarios: Annotated[str | None, typer.Option(help="Comma-separated (default: all).")] = None,
    workers: Annotated[str | None, typer.Option(help="Comma-separated (default: 4,8,32,1024; quick 4,8,32).")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That play cells.")] = 1,
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
    processes: Annotated[int, typer.Option(min=1, help="That play faults, each on hosts of its own.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Break a job on emulated hosts in every way; check what ended, who was named, and every sample and gradient."""
    from dynamix_lab.suites.faults.suite import FaultsPlan, FaultsSuite

    plan = FaultsPlan.of(quick=quick, faults=names_of(faults), seeds=seeds, seed=seed)
    result = conducted(context, FaultsSuite(plan), out=out, resume=resume, as_json=as_json, processes=processes)
    if result["right"] < result["injected"]:
        typer.echo("error: not every fault was borne", err=True)
        raise typer.Exit(1)


@bench.command("fuzz")
@guarded
def bench_fuzz(
    context: typer.Context,
    kinds: Annotated[str | None, typer.Option(help="Kinds of input, comma-separated (default: all).")] = None,
    inputs: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Another one damages otherwise.")] = 0,
    guided: Annotated[bool, typer.Option("--guided", help="Led by coverage (extra fuzz).")] = False,
    processes: Annotated[int, typer.Option(min=1, help="That try inputs.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Damage states, events, policy files, scenarios and traces: each gives an error of ours, or is taken whole."""
    from dynamix_lab.suites.fuzz.suite import FuzzPlan, FuzzSuite

    plan = FuzzPlan.of(kinds=names_of(kinds), inputs=inputs, seed=seed, guided=guided)
    result = conducted(context, FuzzSuite(plan), out=out, resume=resume, as_json=as_json, processes=processes)
    if any(told["escapes"] for told in result["kinds"].values()):
        typer.echo("error: some inputs gave an error that is none of ours, or another state", err=True)
        raise typer.Exit(1)
