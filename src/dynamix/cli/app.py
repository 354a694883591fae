"""The command line. Every command has --json (the result alone on stdout) and shows progress on stderr."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dynamix.cli.console import Json, Mechanism, Out, guarded, print_json, progress
from dynamix.errors import UsageError

app = typer.Typer(
    name="dynamix",
    help="Adaptive per-worker batch sizes for synchronous data-parallel PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
policy = typer.Typer(help="Learn, score and inspect policies.", no_args_is_help=True)
app.add_typer(policy, name="policy")


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


def _print_schema(wanted: bool) -> None:
    if wanted:
        from dynamix.emulator import scenario_schema

        print_json(scenario_schema())
        raise typer.Exit


@app.command(context_settings={"allow_extra_args": True})
@guarded
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
    from dynamix.emulator.run import summary
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
    print_json(result) if as_json else typer.echo(summary(result))
    raise typer.Exit(int(result["exit_code"]))


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


@policy.command("train")
@guarded
def policy_train(
    out: Annotated[Path, typer.Option(help="File to write; a .json beside it says how it was made.")] = Path(
        "policy.safetensors"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same weights.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Kept here; a stopped training goes on from it.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard.")] = None,
    name: Annotated[str, typer.Option("--policy", help="dynamix, dynamix-paper or stigmergic.")] = "dynamix",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the recipe, as often as wanted: --set workers=2,8.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Learn a policy in the simulator: minutes on 2 cores."""
    from dynamix.training.shipped import recipe_of, train_shipped

    recipe_of(name, settings or ())  # a wrong name or setting is said first
    _check_writable(out)
    with progress("training") as tell:
        about = train_shipped(
            name, out, seed=seed, settings=settings or (), progress=tell, checkpoint=checkpoint, tensorboard=tensorboard
        )
    print_json(about) if as_json else typer.echo(f"wrote {out}; dynamix policy show {out}")


@policy.command("evaluate")
@guarded
def policy_evaluate(
    file: Annotated[str, typer.Argument(help="Policy file, or a policy's name.")] = "dynamix",
    seed: Annotated[int, typer.Option(min=0, help="Of the clusters; the training seeds lie elsewhere.")] = 990_001,
    families: Annotated[
        str | None, typer.Option(help="Families or worlds, comma-separated [default: all held-out families].")
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, comma-separated.")] = "2,8,32",
    rows: Annotated[int, typer.Option(min=1, help="Clusters times workers of a family.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Decisions of a run.")] = 50,
    hedged: Annotated[bool, typer.Option(help="With the hedged reference, which takes most of the time.")] = True,
    as_json: Json = False,
) -> None:
    """Score a policy on the calibrated families, beside the other policies and the references."""
    from dynamix.policies import make_policy
    from dynamix.training.evaluation import chosen_cells, evaluate_families, markdown

    make_policy(file)  # a wrong name or file is said before any work
    names, counts = chosen_cells(families, workers)
    with progress("evaluating") as tell:
        found = evaluate_families(
            {file: lambda _: make_policy(file)},
            [seed],
            families=names,
            workers=counts,
            rows=rows,
            windows=windows,
            hedged=hedged,
            progress=tell,
        )
    about = {"schema": 1, "command": "policy evaluate", "seed": seed, "cluster": "simulator"}
    print_json({**about, **found}) if as_json else typer.echo(markdown(found))


@policy.command("show")
@guarded
def policy_show(
    file: Annotated[Path | None, typer.Argument(help="Policy file [default: the shipped one].")] = None,
    as_json: Json = False,
) -> None:
    """How a policy file was made and how it scored."""
    from dynamix.policies.files import describe_policy
    from dynamix.policies.learned.policy import PRETRAINED

    about = describe_policy(file or PRETRAINED)
    if as_json:
        print_json(about)
        return
    import rich

    rich.print_json(data=about)


@app.command()
@guarded
def aggregator(
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    token_file: Annotated[Path | None, typer.Option(help="Holds what workers must know.")] = None,
    jobs: Annotated[int, typer.Option(help="At once.")] = 16,
    memory_mb: Annotated[int, typer.Option(help="For what all jobs have under way.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Longest wait for a worker within a round, seconds.")] = 600,
    as_json: Json = False,
) -> None:
    """Add gradients in the network, for many jobs, until interrupted: CompressionState(aggregator="host:port")."""
    from dynamix.compression.aggregator.job import Limits
    from dynamix.compression.aggregator.server import serve

    limits = Limits(jobs=jobs, memory_bytes=memory_mb << 20, timeout_s=timeout)
    serve(host, port, token_file=token_file, limits=limits, as_json=as_json)


@app.command()
@guarded
def doctor(as_json: Json = False) -> None:
    """What this machine offers, and how to enable what is missing."""
    from dynamix.cli.doctor import examine, show

    found = examine()
    print_json(found) if as_json else show(found)


_LABORATORY = {
    "bench": "Measure dynamix itself.",
    "demo": "Train on an emulated uneven cluster under several policies.",
}


def _add_commands_of_others() -> None:
    """Add the commands that other distributions bring by entry point. A missing laboratory is named by its commands."""
    found = {entry.name: entry for entry in entry_points(group="dynamix.commands")}
    for name, entry in sorted(found.items()):
        command = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    for name, what in _LABORATORY.items():
        if name not in found:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, help=f"{what} Needs dynamix-lab.", context_settings=anything)(_missing(name))


def _missing(name: str) -> Callable[[], None]:
    @guarded
    def command() -> None:
        raise UsageError(f"dynamix {name} is part of the laboratory: pip install dynamix-lab")

    return command


def run() -> None:
    """Build the command line and run it."""
    app()


_add_commands_of_others()

if __name__ == "__main__":
    run()
