"""Measurements of single things.

`dynamix bench overhead`, `simspeed`, `import`, `changecost`, `netcosts`, `stepcount`, `emulator-accuracy`,
`decisions`, `cost`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, Resume, guarded, print_json, progress
from dynamix_lab.commands.group import about, bench, command_line, conducted, names_of


@bench.command("overhead")
@guarded
def bench_overhead(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the demo's job to time.")] = 200,
    decision_only: Annotated[
        bool, typer.Option("--decision-only", help="Only the decision; nothing is emulated.")
    ] = False,
    policies: Annotated[str, typer.Option(help="Whose decisions to time, comma-separated.")] = "dynamix,goodput",
    workers: Annotated[int, typer.Option(min=1, help="Workers decided for.")] = 1024,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The controller's share of a step at W=4 on the demo, and the processor time of a decision for W=1024."""
    from dynamix.events.run_folder import RunFolder
    from dynamix.policies import make_policy
    from dynamix_lab.suites.overhead import decisions, lines, overhead_settings, run_overhead

    names = names_of(policies) or ()
    for name in names:
        make_policy(name)
    if decision_only:
        result = {**about(context, "simulator"), **decisions(names, workers=workers)}
    else:
        settings = overhead_settings(steps, command=command_line(context))
        settings.check()
        with RunFolder("overhead", out) as folder:
            result = run_overhead(settings, folder, policies=names, workers=workers)
    print_json(result) if as_json else typer.echo("\n".join(lines(result)))


@bench.command("simspeed")
@guarded
def bench_simspeed(context: typer.Context, as_json: Json = False) -> None:
    """Worker-steps per second of the simulator, without learning."""
    from dynamix_lab.suites.simspeed import GOAL_STEPS_PER_S, simulator_speeds

    with progress("simulating") as tell:
        sizes = simulator_speeds()
        tell("simulating", 1.0)
    if as_json:
        print_json({**about(context, "simulator"), "sizes": sizes})
        return
    for size in sizes:
        what = f"{size['clusters']:.0f} clusters of {size['workers']:,.0f} workers"
        typer.echo(f"{what}: {size['worker_steps_per_s']:,.0f} worker-steps/s (goal at W=32: {GOAL_STEPS_PER_S:,})")


@bench.command("import")
@guarded
def bench_import(
    context: typer.Context,
    runs: Annotated[int, typer.Option(min=1, help="Fresh interpreters to time.")] = 7,
    as_json: Json = False,
) -> None:
    """What importing the controller costs beyond importing torch."""
    from dynamix_lab.suites.import_cost import import_cost, lines

    with progress("importing") as tell:
        result = import_cost(runs, tell=tell)
    print_json({**about(context, "one process, one thread"), **result}) if as_json else typer.echo(
        "\n".join(lines(result))
    )


@bench.command("changecost")
@guarded
def bench_changecost(
    context: typer.Context,
    workload: Annotated[str, typer.Argument(help="Workload that is trained.")] = "mnist1d",
    as_json: Json = False,
) -> None:
    """What the first step at a batch size that was never met before costs: the processor library prepares kernels."""
    from dynamix_lab.suites.changecost import change_cost

    result = {**about(context, "one process, one thread"), "workload": workload, "cpu_s": change_cost(workload)}
    lines = [f"{what}: {1e3 * seconds:.1f} ms" for what, seconds in result["cpu_s"].items()]
    print_json(result) if as_json else typer.echo("\n".join(lines))


@bench.command("netcosts")
@guarded
def bench_netcosts(
    context: typer.Context,
    nets: Annotated[str | None, typer.Option(help="Comma-separated (default: all).")] = None,
    as_json: Json = False,
) -> None:
    """Processor seconds of a training step by batch size for the small deep nets: the rows of `tasks/net_costs.py`."""
    import json

    from dynamix_lab.suites.netcosts import all_net_costs

    with progress("netcosts") as tell:
        costs = all_net_costs(names_of(nets), tell=tell)
    result = {**about(context, "one process, one thread"), "nets": costs}
    print_json(result) if as_json else typer.echo("\n".join(json.dumps({net: row}) for net, row in costs.items()))


@bench.command("stepcount")
@guarded
def bench_stepcount(
    context: typer.Context,
    workload: Annotated[str, typer.Argument(help="mnist1d or digits.")] = "mnist1d",
    rule: Annotated[str, typer.Option(help="none, or adascale: the learning rate follows the batch.")] = "none",
    most: Annotated[int, typer.Option(min=1, help="Steps after which a run is given up.")] = 3000,
    as_json: Json = False,
) -> None:
    """How many steps a real task needs to its target at each global batch, and the critical batch."""
    from dynamix_lab.suites.stepcount import count_steps, lines

    with progress("stepcount") as tell:
        result = {**about(context, "one process, one thread"), **count_steps(workload, rule, most=most, tell=tell)}
    print_json(result) if as_json else typer.echo("\n".join(lines(result)))


@bench.command("emulator-accuracy")
@guarded
def bench_emulator_accuracy(context: typer.Context, as_json: Json = False) -> None:
    """How even a fixed piece of work runs under the emulator's limits, and what pauses do to a processor's speed."""
    from dynamix_lab.suites.emulator_accuracy import measure_all, table

    with progress("emulator accuracy") as tell:
        result = {**about(context, "emulator"), **measure_all(tell=tell)}
    print_json(result) if as_json else typer.echo(table(result))


@bench.command("decisions")
@guarded
def bench_decisions(
    context: typer.Context,
    against: Annotated[str, typer.Option(help="Revision of this repository to compare with.")],
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Whether every policy still decides what it decided under another revision; exit code 1 if not."""
    from dynamix_lab.suites.decisions.suite import DecisionsPlan, DecisionsSuite

    result = conducted(context, DecisionsSuite(DecisionsPlan(against)), out=out, resume=resume, as_json=as_json)
    if not result["within_limits"]:
        typer.echo(f"error: decisions differ by more than allowed: {result['limits']}", err=True)
        raise typer.Exit(1)


@bench.command("cost")
@guarded
def bench_cost(
    context: typer.Context,
    against: Annotated[str, typer.Option(help="Revision of this repository to compare with.")],
    rounds: Annotated[int, typer.Option(min=2, help="Turns of each revision.")] = 8,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Processor time of decisions for 1,024 workers and of training rounds, beside another revision's."""
    from dynamix_lab.suites.decisions.cost_suite import CostPlan, CostSuite

    conducted(context, CostSuite(CostPlan(against, rounds)), out=out, resume=resume, as_json=as_json)
