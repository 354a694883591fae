"""The command line. Every command has --json (the result alone on stdout) and shows progress on stderr."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
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
    policy_file: Annotated[str | None, typer.Option("--policy", help="Learned policy file to use as dynamix.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --out, without the seeds it finished.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a real model on an emulated uneven cluster under one policy after the other; table and report.html."""
    from dynamix.bench.demo import POLICIES, Settings, run_demo
    from dynamix.telemetry.run_folder import RunFolder

    policies = POLICIES if reference or quick or seeds > 1 else tuple(name for name in POLICIES if name != "reference")
    settings = Settings(
        scenario=scenario, seeds=seeds, seed=seed, steps=steps, quick=quick, policies=policies, policy=policy_file
    )
    settings.check()
    result, reached_end = run_demo(settings, RunFolder("demo", out, resume=resume))
    if as_json:
        _print(result)
    if not reached_end:
        typer.echo("error: not every policy reached its end", err=True)
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True})
@_guarded
def emulate(
    context: typer.Context,
    scenario: Annotated[str, typer.Argument(help="Shipped scenario or YAML file.")],
    seed: Annotated[int, typer.Option(help="Of the disturbance.")] = 0,
    throttle_after: Annotated[
        float | None, typer.Option(min=0, help="Seconds until limits start; default: once all ranks hold a connection.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds until everything is ended; default: none.")
    ] = None,
    mechanism: Annotated[str, typer.Option(help="auto, privileged (root) or duty-cycle (no root).")] = "auto",
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
    from dynamix.bench.overhead import run_overhead
    from dynamix.telemetry.run_folder import RunFolder

    result = run_overhead(RunFolder("overhead", out), steps=steps)
    if as_json:
        _print(result)
        return
    typer.echo(f"step(): {100 * result['step_fraction']:.2f} % of a step at W=4 (goal: 1 %)")
    typer.echo(f"decision for W=1024: {result['decision_ms_1024_workers']['median']:.2f} ms median (goal: 5 ms)")


@bench.command("simspeed")
@_guarded
def bench_simspeed(as_json: Json = False) -> None:
    """Worker-steps per second of the simulator, without learning."""
    from dynamix.bench.simspeed import simulator_speed

    with _progress("simulating") as tell:
        result = simulator_speed()
        tell("simulating", 1.0)
    if as_json:
        _print({"schema": 1, "command": "bench simspeed", **result})
    else:
        typer.echo(f"{result['worker_steps_per_s']:,.0f} simulated worker-steps/s (goal: 500,000)")


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

    if out.suffix != ".safetensors" or not out.parent.is_dir():
        from dynamix.errors import ConfigError

        raise ConfigError("out", str(out), "a .safetensors file in an existing folder", "choose another file")
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
