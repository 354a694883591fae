"""`dynamix policy ...`: inspect policies. The laboratory adds `policy train` and `policy evaluate` by entry point."""

from pathlib import Path
from typing import Annotated, cast

import typer

from dynamix.cli.console import Json, guarded, print_json, progress
from dynamix.errors import ConfigError

policy = typer.Typer(help="Learn, score and inspect policies.", no_args_is_help=True)


@policy.command("show")
@guarded
def policy_show(
    name: Annotated[str, typer.Argument(help="A policy's name or file, or your own MODULE:CLASS.")] = "dynamix",
    as_json: Json = False,
) -> None:
    """What a policy is, how it was made and how it scored; --json prints all that is known."""
    from dynamix.cli.policy_pages import about_policy, print_about

    about = about_policy(name)
    print_json(about) if as_json else print_about(name, about)


@policy.command("explain")
@guarded
def policy_explain(
    name: Annotated[str, typer.Argument(help="A learned policy of the residual kind: a name or a file.")] = "dynamix",
    seed: Annotated[int, typer.Option(min=0, help="Of the simulated clusters.")] = 0,
    workers: Annotated[int, typer.Option(min=2, max=256, help="Of each cluster.")] = 8,
    clusters: Annotated[int, typer.Option(min=1, help="Simulated clusters.")] = 64,
    windows: Annotated[int, typer.Option(min=2, help="Decisions on each.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write a page to this HTML file as well.")] = None,
    as_json: Json = False,
) -> None:
    """What a learned policy does: how far it leaves the goodput rule, and which features move it, and where to."""
    from dynamix.cli.policy_explained import print_explained
    from dynamix.policies import make_policy
    from dynamix.policies.learned.policy import LearnedPolicy
    from dynamix.telemetry.explained import write_explained
    from dynamix_lab.training.explaining import explain_policy

    if out is not None and not out.parent.is_dir():
        raise ConfigError("out", str(out), "a file in a folder that exists", "make the folder first")
    made = cast(LearnedPolicy, make_policy(name))
    with progress("explaining") as tell:
        found = explain_policy(made, seed=seed, workers=workers, clusters=clusters, windows=windows, progress=tell)
    about = {"schema": 1, "command": "policy explain", "policy": name}
    if out is not None:
        write_explained(name, found, out)
    print_json({**about, **found}) if as_json else print_explained(name, found)
