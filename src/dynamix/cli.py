"""The command line. Every command has --json (the result alone on stdout) and shows progress on stderr."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, cast

import typer

from dynamix.errors import DynamixError

app = typer.Typer(
    name="dynamix",
    help="Adaptive per-worker batch sizes for synchronous data-parallel PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure dynamix itself.", no_args_is_help=True)
policy = typer.Typer(help="Learn, score and inspect policies.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(policy, name="policy")

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Mechanism = Annotated[str, typer.Option(help="auto, privileged (root) or duty-cycle (no root).")]
Out = Annotated[Path | None, typer.Option(help="Run folder, new or empty [default: runs/COMMAND-TIME].")]


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Errors of ours become one line and exit code 2; SIGTERM unwinds like Ctrl-C, so that nothing is left behind."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            command(*args, **kwargs)
        except DynamixError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("error: interrupted", err=True)
            raise typer.Exit(130) from error
        finally:
            signal.signal(signal.SIGTERM, before)

    return run


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _print(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr, moved by `tell(what, fraction done)`."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dynamix {version('dynamix-train')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@_guarded
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
    from dynamix.bench.demo import POLICIES, Settings, run_demo
    from dynamix.telemetry.run_folder import RunFolder

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
        _print(result)
    if not reached_end:
        typer.echo("error: not every policy reached its end", err=True)
        raise typer.Exit(1)


def _print_schema(wanted: bool) -> None:
    if wanted:
        from dynamix.emulator import scenario_schema

        _print(scenario_schema())
        raise typer.Exit


@app.command(context_settings={"allow_extra_args": True})
@_guarded
def emulate(
    context: typer.Context,
    scenario: Annotated[str, typer.Argument(help="Shipped scenario or YAML file.")],
    schema: Annotated[
        bool,
        typer.Option(
            "--schema", is_eager=True, callback=_print_schema, help="Print the JSON schema of a scenario, and end."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the disturbance.")] = 0,
    throttle_after: Annotated[
        float | None, typer.Option(min=0, help="Seconds until limits start; default: once all ranks hold a connection.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds until everything is ended; default: none.")
    ] = None,
    mechanism: Mechanism = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run any training script on emulated hosts, one rank each: dynamix emulate demo -- python train.py."""
    from dynamix.emulator.run import emulate as run_emulated
    from dynamix.errors import ConfigError

    if not context.args:
        raise ConfigError("command", "", "a command after --", "dynamix emulate demo -- python train.py")
    result = run_emulated(
        scenario,
        context.args,
        seed=seed,
        out=out,
        throttle_after_s=throttle_after,
        timeout_s=timeout,
        mechanism=cast(Any, mechanism),
    )
    if as_json:
        _print(result)
    raise typer.Exit(int(result["exit_code"]))


@bench.command("overhead")
@_guarded
def bench_overhead(
    steps: Annotated[int, typer.Option(min=1, help="Steps of the demo's job to time.")] = 200,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The controller's share of a step at W=4 on the demo, and the time of a decision for W=1024."""
    from dynamix.bench.overhead import overhead_settings, run_overhead
    from dynamix.telemetry.run_folder import RunFolder

    overhead_settings(steps).check()
    with RunFolder("overhead", out) as folder:
        result = run_overhead(folder, steps=steps)
    if as_json:
        _print(result)
        return
    typer.echo(f"step(): {100 * result['step_fraction']:.2f} % of a step at W=4 (goal: 1 %)")
    typer.echo(f"decision for W=1024: {result['decision_ms_1024_workers']['median']:.2f} ms median (goal: 5 ms)")


@bench.command("simspeed")
@_guarded
def bench_simspeed(as_json: Json = False) -> None:
    """Worker-steps per second of the simulator, without learning."""
    from dynamix.bench.simspeed import GOAL_STEPS_PER_S, simulator_speeds

    with _progress("simulating") as tell:
        result = simulator_speeds()
        tell("simulating", 1.0)
    if as_json:
        _print({"schema": 1, "command": "bench simspeed", "cluster": "simulator", "sizes": result})
        return
    for size in result:
        what = f"{size['clusters']:.0f} clusters of {size['workers']:,.0f} workers"
        typer.echo(f"{what}: {size['worker_steps_per_s']:,.0f} worker-steps/s (goal at W=32: {GOAL_STEPS_PER_S:,})")


Resume = Annotated[bool, typer.Option("--resume", help="Go on in --out, without what it finished.")]
Policies = Annotated[str | None, typer.Option(help="Comma-separated names [default: the suite's].")]


@bench.command("tta")
@_guarded
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
    from dynamix.bench.live import QUICK_SCENARIOS, SCENARIOS, Plan, run_tta
    from dynamix.bench.simulated import tta_suite
    from dynamix.errors import ConfigError
    from dynamix.telemetry.run_folder import RunFolder

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
        _print(result)
    if not arrived:
        typer.echo("error: not every run reached the target", err=True)
        raise typer.Exit(1)


@bench.command("scaling")
@_guarded
def bench_scaling(
    quick: Annotated[bool, typer.Option("--quick", help="To 128 workers instead of 1,024.")] = False,
    policies: Policies = None,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """From 2 to 1,024 simulated workers under frequent slowdowns."""
    from dynamix.bench.simulated import scaling_suite

    _simulated(
        scaling_suite(quick=quick, policies=policies.split(",") if policies else None), "scaling", out, resume, as_json
    )


def _simulated(suite: Any, name: str, out: Path | None, resume: bool, as_json: bool) -> None:
    from dynamix.bench.simulated import markdown, run_suite
    from dynamix.telemetry.run_folder import RunFolder

    suite.check()
    with _progress(name) as tell, RunFolder(name, out, resume=resume) as folder:
        result = run_suite(suite, folder, tell=tell)
    _print(result) if as_json else typer.echo(markdown(result["cells"]))


@bench.command("fidelity")
@_guarded
def bench_fidelity(
    against: Annotated[Path | None, typer.Option(help="Folder of a finished `bench tta`, to compare with.")] = None,
    calibrate_on: Annotated[str, typer.Option(help="Its scenario that costs are taken from.")] = "steady-uneven",
    as_json: Json = False,
) -> None:
    """Errors of the simulator: on measurements its fits have not seen, and against the emulator."""
    from dynamix.bench.fidelity import lines, run_fidelity

    result = run_fidelity(against, calibrate_on=calibrate_on)
    _print(result) if as_json else typer.echo("\n".join(lines(result)))


def _check_writable(out: Path) -> None:
    """Raises `ConfigError` now rather than after minutes of work."""
    from dynamix.errors import ConfigError

    allowed = "a .safetensors file in an existing folder that can be written"
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise ConfigError("out", str(out), allowed, "choose another file")
    for file in (out, out.with_suffix(".json")):
        if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
            raise ConfigError("out", str(file), allowed, "it is there already and cannot be replaced")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ConfigError("out", str(out), allowed, f"choose another file ({error.strerror})") from error


@bench.command("workloads")
@_guarded
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
    from dynamix.bench.workloads import Plan, markdown, run_workloads
    from dynamix.telemetry.run_folder import RunFolder

    plan = Plan.of(quick=quick, names=only.split(",") if only else None, budget_s=seconds, seed=seed)
    with _progress("workloads") as tell, RunFolder("workloads", out, resume=resume) as folder:
        result = run_workloads(plan, folder, tell=tell)
    _print(result) if as_json else typer.echo(markdown(result["workloads"]))


@policy.command("train")
@_guarded
def policy_train(
    out: Annotated[Path, typer.Option(help="File to write; a .json beside it says how it was made.")] = Path(
        "policy.safetensors"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn a policy in the simulator: minutes on 2 cores."""
    from dynamix.learning.training import train_and_save

    _check_writable(out)
    with _progress("training") as tell:
        about = train_and_save(out, seed=seed, progress=tell)
    _print(about) if as_json else typer.echo(f"wrote {out}; dynamix policy show {out}")


@policy.command("evaluate")
@_guarded
def policy_evaluate(
    file: Annotated[str, typer.Argument(help="Policy file, or a policy's name.")] = "dynamix",
    seed: Annotated[int, typer.Option(min=0, help="Of the clusters; the training seeds lie elsewhere.")] = 990_001,
    as_json: Json = False,
) -> None:
    """Score a policy on simulated clusters against the lagged reference, static and LB-BSP."""
    from dynamix.learning.evaluation import evaluate
    from dynamix.policies import make_policy

    make_policy(file)  # a wrong name or file is said before any work
    with _progress("evaluating") as tell:
        by_workers = evaluate({file: lambda _: make_policy(file)}, [seed], progress=tell)
    if as_json:
        _print(
            {"schema": 1, "command": "policy evaluate", "seed": seed, "cluster": "simulator", "by_workers": by_workers}
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("workers", "policy", "reference time / time", "worst decile", title="simulated; 1 is the reference")
    for workers, scores in by_workers.items():
        for name, score in scores.items():
            table.add_row(workers, name, f"{score['geometric_mean']:.3f}", f"{score['worst_decile']:.3f}")
    Console().print(table)


@policy.command("show")
@_guarded
def policy_show(
    file: Annotated[Path | None, typer.Argument(help="Policy file [default: the shipped one].")] = None,
    as_json: Json = False,
) -> None:
    """How a policy file was made and how it scored."""
    from dynamix.learning.training import show
    from dynamix.policies.learned import PRETRAINED

    about = show(file or PRETRAINED)
    if as_json:
        _print(about)
        return
    from rich import print_json

    print_json(data=about)


@app.command()
@_guarded
def doctor(as_json: Json = False) -> None:
    """What this machine offers, and how to enable what is missing."""
    from dynamix.bench.doctor import examine

    found = examine()
    if as_json:
        _print(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "what", "detail", show_edge=False)
    for area, entries in found["areas"].items():
        table.add_section()
        table.add_row("", f"[bold]{area}", "")
        for entry in entries:
            table.add_row("[green]✓" if entry["available"] else "[yellow]–", entry["name"], entry["detail"])
    Console().print(table)


def main() -> None:
    """Entry point of the `dynamix` command."""
    app()


if __name__ == "__main__":
    main()
