"""`dynamix bench ...`: the commands that measure. What they measure with is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dynamix.cli.console import Json, Mechanism, Out, Policies, Resume, guarded, print_json, progress

bench = typer.Typer(help="Measure dynamix itself.", no_args_is_help=True)


@bench.command("overhead")
@guarded
def bench_overhead(
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
    from dynamix_lab.suites.overhead import lines, only_decisions, overhead_settings, run_overhead

    names = policies.split(",")
    for name in names:
        make_policy(name)
    if decision_only:
        result = only_decisions(names, workers=workers)
    else:
        overhead_settings(steps).check()
        with RunFolder("overhead", out) as folder:
            result = run_overhead(folder, steps=steps, policies=names, workers=workers)
    print_json(result) if as_json else typer.echo("\n".join(lines(result)))


@bench.command("simspeed")
@guarded
def bench_simspeed(as_json: Json = False) -> None:
    """Worker-steps per second of the simulator, without learning."""
    from dynamix_lab.suites.simspeed import GOAL_STEPS_PER_S, simulator_speeds

    with progress("simulating") as tell:
        result = simulator_speeds()
        tell("simulating", 1.0)
    if as_json:
        print_json({"schema": 1, "command": "bench simspeed", "cluster": "simulator", "sizes": result})
        return
    for size in result:
        what = f"{size['clusters']:.0f} clusters of {size['workers']:,.0f} workers"
        typer.echo(f"{what}: {size['worker_steps_per_s']:,.0f} worker-steps/s (goal at W=32: {GOAL_STEPS_PER_S:,})")


@bench.command("import")
@guarded
def bench_import(
    runs: Annotated[int, typer.Option(min=1, help="Fresh interpreters to time.")] = 7,
    as_json: Json = False,
) -> None:
    """What importing the controller costs beyond importing torch."""
    from dynamix_lab.suites.import_cost import import_cost, lines

    with progress("importing") as tell:
        result = import_cost(runs, tell=tell)
    print_json({"schema": 1, "command": "bench import", **result}) if as_json else typer.echo("\n".join(lines(result)))


@bench.command("tta")
@guarded
def bench_tta(
    cluster: Annotated[str, typer.Option(help="emulator (real training) or simulator.")] = "emulator",
    quick: Annotated[
        bool, typer.Option("--quick", help="Under 10 minutes: fewer scenarios or families, one seed.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Pairs per scenario (emulator).")] = 5,
    seed: Annotated[int, typer.Option(help="First seed (emulator).")] = 0,
    scenarios: Annotated[
        str | None, typer.Option(help="Scenarios or families, comma-separated [default: all].")
    ] = None,
    policies: Policies = None,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time to accuracy of every policy: on emulated hosts, or in the simulator on all held-out families."""
    from dynamix.errors import ConfigError
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.suites.simulated import tta_suite
    from dynamix_lab.suites.tta import QUICK_SCENARIOS, SCENARIOS, Plan, run_tta

    names = policies.split(",") if policies else None
    places = scenarios.split(",") if scenarios else None
    if cluster == "simulator":
        _simulated(tta_suite(quick=quick, policies=names, families=places), "tta", out, resume, as_json)
        return
    if cluster != "emulator":
        raise ConfigError("cluster", cluster, "emulator, simulator", "choose one of them")
    plan = Plan(
        scenarios=tuple(places or (QUICK_SCENARIOS if quick else SCENARIOS)), seeds=1 if quick else seeds, seed=seed,
        policies=tuple(names or (["static", "dynamix"] if quick else ["reference", "static", "dbs", "lb_bsp", "dynamix"])),
        quick=quick,
    )  # fmt: skip
    plan.settings()
    with RunFolder("tta", out, resume=resume) as folder:
        result, arrived = run_tta(plan, folder)
    if as_json:
        print_json(result)
    if not arrived:
        typer.echo("error: not every run reached the target", err=True)
        raise typer.Exit(1)


@bench.command("scaling")
@guarded
def bench_scaling(
    cluster: Annotated[
        str, typer.Option(help="simulator (2 to 1,024 workers), or virtual (real training at 8, 16 and 32).")
    ] = "simulator",
    quick: Annotated[bool, typer.Option("--quick", help="To 128 workers; virtual: a small net at 8.")] = False,
    workers: Annotated[str | None, typer.Option(help="Of virtual's 8,16,32, comma-separated [default: all].")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Pairs of virtual [default: 3].")] = None,
    cases: Annotated[
        str | None, typer.Option(help="Of virtual's vgg16-sgd,vgg11-sgd,vgg11-adam [default: all].")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=600, help="Of a run of virtual; longer runs converge.")] = None,
    policies: Policies = None,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Many workers: simulated ones under frequent slowdowns, or the DYNAMIX paper's tables on the virtual clock."""
    from dynamix.errors import ConfigError
    from dynamix_lab.suites.simulated import scaling_suite

    names = policies.split(",") if policies else None
    if cluster == "virtual":
        _virtual(quick, names, workers, seeds, cases, samples, out, resume, as_json)
        return
    if cluster != "simulator" or workers or seeds or cases or samples:
        given = cluster if cluster != "simulator" else f"simulator with {workers=}, {seeds=}, {cases=}, {samples=}"
        raise ConfigError("cluster", given, "simulator, or virtual with these options", "choose one of them")
    _simulated(scaling_suite(quick=quick, policies=names), "scaling", out, resume, as_json)


def _virtual(
    quick: bool, policies: list[str] | None, workers: str | None, seeds: int | None, cases: str | None,
    samples: int | None, out: Path | None, resume: bool, as_json: bool,
) -> None:  # fmt: skip
    from dynamix.errors import ConfigError
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.suites.scaling.suite import Plan, run_scaling

    counts = workers.split(",") if workers else []
    if not all(count.isdecimal() for count in counts):
        raise ConfigError("workers", workers, "8, 16 and 32, comma-separated", "say 8,16")
    plan = Plan.of(
        quick=quick, policies=policies, workers=[int(count) for count in counts] or None, seeds=seeds,
        cases=cases.split(",") if cases else None, samples=samples,
    )  # fmt: skip
    plan.check()
    with progress("scaling") as tell, RunFolder("scaling", out, resume=resume) as folder:
        result = run_scaling(plan, folder, tell=tell)
    print_json(result) if as_json else typer.echo(result["table"])


def _simulated(suite: Any, name: str, out: Path | None, resume: bool, as_json: bool) -> None:
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.suites.simulated import markdown, run_suite

    suite.check()
    with progress(name) as tell, RunFolder(name, out, resume=resume) as folder:
        result = run_suite(suite, folder, tell=tell)
    print_json(result) if as_json else typer.echo(markdown(result["cells"]))


@bench.command("fidelity")
@guarded
def bench_fidelity(
    against: Annotated[Path | None, typer.Option(help="Folder of a finished `bench tta`, to compare with.")] = None,
    calibrate_on: Annotated[str, typer.Option(help="Its scenarios whose runs tell the costs.")] = "all",
    predict: Annotated[
        str | None,
        typer.Option(
            help="Policies to predict with those costs instead of its runs, comma-separated; ratios are to the first."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Disturbances to predict them for.", min=1)] = 6,
    trained: Annotated[
        bool, typer.Option("--trained", help="Predict by the training itself, some 50 s of a core per run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Errors of the simulator: on measurements its fits have not seen, and against the emulator."""
    from dynamix_lab.suites.fidelity.suite import lines, run_fidelity

    with progress("fidelity") as tell:
        result = run_fidelity(
            against, calibrate_on=calibrate_on, predict=predict.split(",") if predict else (), seeds=seeds,
            trained=trained, tell=tell,
        )  # fmt: skip
    print_json(result) if as_json else typer.echo("\n".join(lines(result)))


@bench.command("workloads")
@guarded
def bench_workloads(
    quick: Annotated[bool, typer.Option("--quick", help="One workload of each kind, 8 s each.")] = False,
    only: Annotated[
        str | None, typer.Option(help="Workloads, comma-separated [default: all that need no files].")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Processor time of training each [default: 60, quick 8].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data, weights and sample order.")] = 0,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Steps per second, noise scale and reachable score of each workload on one core of this machine."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.suites.tasks import Plan, markdown, run_workloads

    plan = Plan.of(quick=quick, names=only.split(",") if only else None, budget_s=seconds, seed=seed)
    with progress("workloads") as tell, RunFolder("workloads", out, resume=resume) as folder:
        result = run_workloads(plan, folder, tell=tell)
    print_json(result) if as_json else typer.echo(markdown(result["workloads"]))


@bench.command("peers")
@guarded
def bench_peers(
    scenario: Annotated[str, typer.Option(help="Shipped scenario or YAML file.")] = "steady-uneven",
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: 16 steps each, no meaningful times.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of paired seeds.")] = 1,
    seed: Annotated[int, typer.Option(help="First seed of model and data.")] = 0,
    peers: Annotated[
        str | None, typer.Option(help="Comma-separated, such as ddp,adaptdl-256,hivemind-local [default: all].")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Of dynamix, beside them; static among them [default: static, three of dynamix].")
    ] = None,
    venvs: Annotated[
        Path | None, typer.Option(help="Folder of the peers' environments, made if missing [default: in the cache].")
    ] = None,
    again: Annotated[bool, typer.Option(help="Static once more at the end of each seed: the A/A pair.")] = True,
    mechanism: Mechanism = "auto",
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Plain DDP, AdaptDL and Hivemind, each in its own environment, beside dynamix on the same emulated hosts."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.peers.kinds import PEERS, Peer
    from dynamix_lab.peers.report import markdown
    from dynamix_lab.peers.suite import POLICIES, Plan, run_peers

    names = tuple(dict.fromkeys(Peer.of(name).name for name in peers.split(","))) if peers else PEERS
    plan = Plan(
        scenario=scenario, seeds=seeds, seed=seed, policies=tuple(policies.split(",")) if policies else POLICIES,
        peers=names, venvs=venvs,
        quick=quick, again=again, mechanism=cast(Any, mechanism),
    )  # fmt: skip
    plan.check()
    with RunFolder("peers", out, resume=resume) as folder:
        result, arrived = run_peers(plan, folder)
    print_json(result) if as_json else typer.echo(markdown(result))
    if not arrived:
        typer.echo("error: a peer failed, or a policy of dynamix did not reach its end", err=True)
        raise typer.Exit(1)


@bench.command("compression")
@guarded
def bench_compression(
    quick: Annotated[
        bool, typer.Option("--quick", help="Two workloads, four hosts, 100 Mbit/s, 50 steps of the identity check.")
    ] = False,
    workloads: Annotated[
        str | None, typer.Option(help="Comma-separated: ratings, lstm, transformer, vgg19 [default: all].")
    ] = None,
    rates: Annotated[str | None, typer.Option(help="Link rates, Mbit/s, comma-separated [default: 100,1000].")] = None,
    workers: Annotated[str | None, typer.Option(help="Hosts, comma-separated [default: 4,8].")] = None,
    ways: Annotated[
        str | None, typer.Option(help="Comma-separated, dense,dense-again among them [default: all].")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each way in a cell [default: 4, quick 3].")] = None,
    steps: Annotated[int | None, typer.Option(help="Timed steps a turn [default: 6, quick 4].")] = None,
    identity_steps: Annotated[
        int | None, typer.Option(help="Of the check against dense in fixed point; 0: none [default: 500, quick 50].")
    ] = None,
    identity_only: Annotated[bool, typer.Option("--identity-only", help="Only that check: no links, no root.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, data and the order of turns.")] = 0,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Gradient exchanges side by side on emulated hosts with shaped links: time, bytes, and whether training is the same."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.suites.compression.report import markdown
    from dynamix_lab.suites.compression.suite import Plan, run_compression
    from dynamix_lab.suites.compression.summary import unexplained

    plan = Plan.of(
        quick=quick, jobs=_names(workloads), rates_mbit_s=() if identity_only else _numbers("rates", rates),
        workers=_numbers("workers", workers), ways=_names(ways), rounds=rounds, steps=steps,
        identity_steps=identity_steps, seed=seed,
    )  # fmt: skip
    plan.check()
    with progress("compression") as tell, RunFolder("compression", out, resume=resume) as folder:
        result = run_compression(plan, folder, tell=tell)
    print_json(result) if as_json else typer.echo(markdown(result))
    if unexplained(result["cells"]):
        typer.echo("error: a lossless way that never went dense did not train as dense in fixed point does", err=True)
        raise typer.Exit(1)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(text.split(","))


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    from dynamix.errors import ConfigError

    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(name, text, "whole numbers, separated by commas", "correct the argument") from error


@bench.command("stigmergy")
@guarded
def bench_stigmergy(
    quick: Annotated[bool, typer.Option("--quick", help="About two minutes: to 32 workers, one seed.")] = False,
    scenarios: Annotated[str | None, typer.Option(help="Comma-separated [default: all].")] = None,
    workers: Annotated[str | None, typer.Option(help="Comma-separated [default: 4,8,32,1024; quick 4,8,32].")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That play cells.")] = 1,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Workers that decide for themselves against central policies, with failures and ablations, in the simulator."""
    from dataclasses import replace

    from dynamix.errors import ConfigError
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.suites.stigmergy.report import markdown
    from dynamix_lab.suites.stigmergy.suite import Plan, run_suite

    plan = Plan.of(quick=quick)
    if scenarios:
        plan = replace(plan, scenarios=tuple(scenarios.split(",")))
    if workers:
        if not all(w.isdecimal() for w in workers.split(",")):
            raise ConfigError("workers", workers, "whole numbers, comma-separated", "4,8,32, say")
        plan = replace(plan, workers=tuple(int(w) for w in workers.split(",")))
    plan.check()
    with progress("stigmergy") as tell, RunFolder("stigmergy", out, resume=resume) as folder:
        result = run_suite(plan, folder, processes=processes, tell=tell)
    print_json(result) if as_json else typer.echo(markdown(result))


@guarded
def demo(
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
    from dynamix_lab.harness.launch import POLICIES, Settings

    policies = POLICIES if reference or quick or seeds > 1 else tuple(name for name in POLICIES if name != "reference")
    settings = Settings(
        scenario=scenario,
        seeds=seeds,
        seed=seed,
        steps=steps,
        quick=quick,
        policies=policies,
        policy=policy_file,
        mechanism=cast(Any, mechanism),
    )
    settings.check()
    with RunFolder("demo", out, resume=resume) as folder:
        result, reached_end = run_demo(settings, folder)
    if as_json:
        print_json(result)
    if not reached_end:
        typer.echo("error: not every policy reached its end", err=True)
        raise typer.Exit(1)
