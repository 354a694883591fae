"""`dynamix compare`: policies take turns in one job of the user's, which says how many times as fast each is."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix.errors import ConfigError, UsageError

POLICIES = "static,lb_bsp,goodput"
_MINUTES = "Of training, after which the job is ended (SIGTERM); default: it ends by itself."
_READ = "Only tell again what this run folder, or this events file, holds."


@guarded
def compare(
    context: typer.Context,
    policies: Annotated[str, typer.Option(help="Names, comma-separated; all are compared with the first.")] = POLICIES,
    minutes: Annotated[float | None, typer.Option(min=0.1, help=_MINUTES)] = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between lines of progress.")] = 15.0,
    read: Annotated[Path | None, typer.Option(help=_READ)] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Say how many times as fast each policy is, in one job of yours: dynamix compare -- torchrun ... train.py."""
    if read is not None:
        result = _told(read / "events.jsonl" if read.is_dir() else read)
    else:
        result = _run(context.args, policies, None if minutes is None else 60 * minutes, every, out)
    print_json(result) if as_json else _print(result)
    raise typer.Exit(int(result.get("exit_code", 0)))


def _run(command: list[str], policies: str, most_s: float | None, every_s: float, out: Path | None) -> dict[str, Any]:
    """Run the command under the policies in turns; what result.json holds."""
    from dynamix.events.records import EVENTS_VARIABLE, SCHEMA
    from dynamix.events.run_folder import RunFolder
    from dynamix.observe.command import run_command
    from dynamix.observe.run import cluster
    from dynamix.policies.alternating import by_names
    from dynamix.runtime.config import OUTSIDE
    from dynamix.telemetry.turns import Turns

    if not command:
        raise ConfigError("command", "", "a program and its arguments", "dynamix compare -- torchrun ... train.py")
    by_names(policies)  # what is wrong with a name is said before anything runs
    with RunFolder("compare", out) as folder:
        facts = {"command": "compare", "job": command, "cluster": cluster(), "compare": policies.split(",")}
        folder.write_run(**facts)
        events = (folder.path / "events.jsonl").resolve()
        turns, ended = Turns(events), False

        def tell(job: subprocess.Popen[bytes]) -> None:
            nonlocal ended
            if events.exists():
                turns.refresh()
            typer.echo(f"compare: {_progress(turns)}", err=True)
            if most_s is not None and turns.seconds >= most_s and not ended:
                ended = True
                job.terminate()

        env = {**os.environ, OUTSIDE["policy"]: f"compare:{policies}", EVENTS_VARIABLE: str(events)}
        code = run_command(command, env, every_s=every_s, tell=tell)
        result = {"schema": SCHEMA, **facts, "exit_code": 0 if ended else code, "folder": str(folder.path)}
        if not events.exists() and code:
            raise typer.Exit(code)  # the job has said why
        result |= _told(events)
        folder.write_result(result)
    return result


def _progress(turns: Any) -> str:
    speeds = turns.speeds()
    if not speeds:
        return f"{turns.seconds:.0f} s of training, no block counts yet"
    first, *others = speeds
    each = ", ".join(f"{one.policy} {_times(one)}" for one in others)
    return f"{turns.seconds:.0f} s of training, {first.windows} blocks; times as fast as {first.policy}: {each}"


def _told(events: Path) -> dict[str, Any]:
    """What an events file says of the policies that took turns. Raises `UsageError` where it says nothing."""
    from dynamix.telemetry.turns import LEAST_BLOCKS, Turns, cost

    turns = Turns(events)
    turns.refresh()
    speeds = turns.speeds()
    if not turns.policies:
        why = f"{events} holds no window of policies that take turns: the script makes no dynamix.Controller, names"
        raise UsageError(f"{why} an events file of its own (leave events= out), or ended within a window")
    fastest = max(speeds, key=lambda one: one.samples_s, default=None)
    rows = [{**one._asdict(), "samples_s": one.samples_s} for one in speeds]
    return {
        "policies": [
            {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in r.items()} for r in rows
        ],
        "seconds": turns.seconds,
        "fastest": None if fastest is None else fastest.policy,
        "cost": cost(speeds) if speeds else None,
        "enough": bool(speeds) and speeds[0].windows >= LEAST_BLOCKS,
    }


def _times(one: Any) -> str:
    limits = f" ({one.low:.2f} to {one.high:.2f})" if math.isfinite(one.low) else ""
    return f"{one.times:.2f}{limits}"


def _print(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console, rows = Console(highlight=False), result["policies"]
    heads = ("policy", "times as fast", "95 %", "samples/s", "windows")
    shown = Table(*[Column(head, justify="right" if i else "left") for i, head in enumerate(heads)], box=SIMPLE_HEAD)
    for row in rows:
        limits = "" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}"
        shown.add_row(
            Text(row["policy"]), f"{row['times']:.2f}", limits, f"{row['samples_s']:.0f}", str(row["windows"])
        )
    if rows:
        console.print(shown)
    if not result["enough"]:
        console.print("The job ended too early to say how sure this is: let it train longer.")
    if rows:
        console.print(
            f"In {result['seconds']:.0f} s of training, of which {100 * result['cost']:.0f} % would have been saved by "
            f"{result['fastest']} alone."
        )
        console.print("This is so for what the cluster did in that time: where neighbours come and go, compare longer.")
