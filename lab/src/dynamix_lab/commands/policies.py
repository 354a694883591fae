"""`dynamix policy train` and `dynamix policy evaluate`. Libraries are imported when a command runs."""

import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamix.cli.console import Json, guarded, print_json
from dynamix_lab.commands.group import names_of, progress
from dynamix_lab.installed import need_bench

QUICK_ROWS, QUICK_WINDOWS = 32, 20


def _check_writable(out: Path) -> None:
    """Raise `ConfigError` now instead of after minutes of work."""
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


@guarded
def policy_train(
    out: Annotated[Path, typer.Option(help="File to write, a .json beside it.")] = Path("policy.safetensors"),
    seed: Annotated[int, typer.Option(min=0, help="Seed; the same one gives the same weights.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="File that a stopped training goes on from.")] = None,
    name: Annotated[str, typer.Option("--policy", help="dynamix, dynamix-paper or stigmergic.")] = "dynamix",
    settings: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the recipe; repeatable.")] = None,
    show: Annotated[
        bool, typer.Option("--settings", help="Print what --set takes, its values and meanings, and end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Learn a policy in the simulator: minutes on 2 cores."""
    from dynamix import __version__
    from dynamix.events.run_folder import commit
    from dynamix_lab.training.dynamix_policy import choice
    from dynamix_lab.training.shipped import meanings_of, recipe_of, settings_of, train_shipped

    recipe = recipe_of(name, settings or ())  # rejects a wrong name or setting first
    if show:
        found = settings_of(recipe)
        meant = meanings_of(recipe)
        lines = "\n".join(f"{f'{setting}={value}':<30}  {meant[setting]}" for setting, value in found.items())
        print_json(found) if as_json else typer.echo(lines)
        return
    need_bench("dynamix policy train", ("scipy",))
    _check_writable(out)
    with progress("training") as tell:
        about = train_shipped(name, out, seed=seed, settings=settings or (), progress=tell, checkpoint=checkpoint)
    changed = "".join(f" --set {shlex.quote(setting)}" for setting in settings or ())
    command = f"dynamix policy train --policy {name} --seed {seed}{changed}"
    about |= {"command": command, "commit": commit(), "version": __version__}  # how it was made
    out.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if name == "dynamix" and (said := choice(about)):
        typer.echo(said, err=True)
    print_json(about) if as_json else typer.echo(f"wrote {out}; dynamix policy show {out}")


@guarded
def policy_evaluate(
    name: Annotated[str, typer.Argument(help="A policy's name or file, or your own MODULE:CLASS.")] = "dynamix",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the clusters; training has other seeds.")] = 990_001,
    families: Annotated[str | None, typer.Option(help="Families or worlds, comma-separated (default: all).")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, comma-separated.")] = "2,8,32",
    rows: Annotated[int, typer.Option(min=1, help="Clusters times workers in each family.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Decisions in each run.")] = 50,
    against: Annotated[str | None, typer.Option(help="More policies to show beside it, comma-separated.")] = None,
    hedged: Annotated[bool, typer.Option(help="Also run the hedged reference, which takes most of the time.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Quick look: few clusters, 20 decisions, no hedged.")] = False,
    as_json: Json = False,
) -> None:
    """Score a policy on the calibrated families, beside static, rules and references that know the true costs."""
    from dynamix.policies import make_policy
    from dynamix_lab.commands.policy_pages import print_evaluation
    from dynamix_lab.training.evaluation import chosen_cells, evaluate_families, named

    need_bench("dynamix policy evaluate", ("scipy",))
    policies = [*(names_of(against) or ()), name]
    for one in policies:
        make_policy(one)  # rejects a wrong name or file before any work
    names, counts = chosen_cells(families, workers)
    if quick:
        rows, windows, hedged = min(rows, QUICK_ROWS), min(windows, QUICK_WINDOWS), False
    with progress("evaluating") as tell:
        size: dict[str, Any] = {"workers": counts, "rows": rows, "windows": windows, "hedged": hedged}
        found = evaluate_families({one: named(one) for one in policies}, [seed], families=names, **size, progress=tell)
    about = {"schema": 1, "command": "policy evaluate", "seed": seed, "cluster": "simulator"}
    print_json({**about, **found}) if as_json else print_evaluation(name, seed, found)
