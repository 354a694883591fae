"""`dynamix compare`: policies take turns in a user's job, and the speed of each is compared with the first one's."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamix.cli.console import Command, Json, Out, guarded, print_json
from dynamix.errors import UsageError

if TYPE_CHECKING:
    from dynamix.telemetry.turns import PolicyTurns, Speed

POLICIES = "static,lb_bsp,goodput"
_MINUTES = "End the job (SIGTERM) after so many minutes of training (default: it ends by itself)."
_ENDED = "compare: ended the job by SIGTERM (signal 15) after {:g} minutes, so a traceback above is no failure"
_READ = "Start nothing: print the result of this run folder, or of this events file."


@guarded
def compare(
    command: Command = None,
    policies: Annotated[str, typer.Option(help="Comma-separated; all are compared with the first policy.")] = POLICIES,
    minutes: Annotated[float | None, typer.Option(min=0.1, help=_MINUTES)] = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between lines of progress.")] = 15.0,
    read: Annotated[Path | None, typer.Option(help=_READ)] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare the speed of policies in one job of yours: dynamix compare -- torchrun ... train.py."""
    if read is not None:
        result = _told(read / "events.jsonl" if read.is_dir() else read)
    else:
        result = _run(command or [], policies, 60 * (minutes or math.inf), every, out)
    print_json(result) if as_json else typer.echo(result["text"])
    raise typer.Exit(int(result.get("exit_code", 0)))


def _run(command: list[str], policies: str, most_s: float, every_s: float, out: Path | None) -> dict[str, Any]:
    """Run the command under the policies in turns; returns the content of result.json."""
    from dynamix.events.records import EVENTS_VARIABLE, SCHEMA
    from dynamix.events.run_folder import RunFolder
    from dynamix.observe.command import check_command, run_command
    from dynamix.observe.run import cluster
    from dynamix.policies.alternating import by_names
    from dynamix.runtime.config import OUTSIDE
    from dynamix.telemetry.turns import PolicyTurns

    run = command and (Path(command[0]).is_dir() or command[0].endswith(".jsonl"))
    if run and shutil.which(command[0]) is None:  # a program may have the name of a folder
        line = f"dynamix report {' '.join(command)}"
        raise UsageError(f"dynamix compare starts a job. To compare runs that are there, write {line}")
    check_command(command, "compare")
    by_names(policies)  # a wrong name is reported before anything runs
    with RunFolder("compare", out) as folder:
        facts = {"command": "compare", "job": command, "cluster": cluster(), "compare": policies.split(",")}
        folder.write_run(**facts)
        events = (folder.path / "events.jsonl").resolve()
        turns, ended = PolicyTurns(events), False

        def tell(job: subprocess.Popen[bytes]) -> None:
            nonlocal ended
            turns.refresh()
            typer.echo(f"compare: {_progress(turns)}", err=True)
            if turns.seconds >= most_s and not ended:  # once: do not disturb a launcher ending its ranks
                ended = True
                job.terminate()

        env = {**os.environ, OUTSIDE["policy"]: f"compare:{policies}", EVENTS_VARIABLE: str(events)}
        code = run_command(command, env, every_s=every_s, tell=tell)
        turns.refresh()
        if ended:
            code = 0
            typer.echo(_ENDED.format(most_s / 60), err=True)
        elif code and not turns.speeds():
            raise typer.Exit(code)  # the job has printed the reason
        result = {"schema": SCHEMA, **facts, "exit_code": code, "folder": str(folder.path), **_told(events)}
        folder.write_result(result)
    return result


def _progress(turns: PolicyTurns) -> str:
    each = ", ".join(f"{one.policy} {_times(one)}" for one in turns.speeds()) or "no result yet"
    return f"{turns.seconds:.0f} s of training; times as fast: {each}"


def _told(events: Path) -> dict[str, Any]:
    """The results in an events file of policies that took turns. Raises `UsageError` if there are none."""
    from dynamix.telemetry.turns import PolicyTurns, cost

    turns = PolicyTurns(events)
    turns.refresh()
    if not (speeds := turns.speeds()):
        why = "the script makes no dynamix.Controller, or its rank 0 does not run here"
        why = f"the job ended after {turns.seconds:.0f} s, before each policy had three turns" if turns.seconds else why
        raise UsageError(f"{events} holds no result yet: {why}")
    fastest, saved = max(speeds, key=lambda one: one.samples_s), cost(speeds)
    rows = [one._asdict() | {"samples_s": one.samples_s} for one in speeds]
    plain = [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]
    width = max(len(one.policy) for one in speeds)
    text = [f"{one.policy:{width}}  {_times(one):22}{one.samples_s:9,.0f} samples/s" for one in speeds]
    text += ["", f"Speed as a multiple of {speeds[0].policy}'s (95 % range), in {speeds[0].windows} blocks of the job."]
    text += [] if math.isfinite(speeds[-1].low) else ["The job was too short for ranges: run it for longer."]
    text += [f"{fastest.policy} alone would have saved {100 * saved:.0f} % of these {turns.seconds:.0f} s of training."]
    text += ["The figures hold for the cluster's load in that time: if other jobs come and go, compare for longer."]
    known = {"policies": plain, "seconds": turns.seconds, "fastest": fastest.policy, "cost": saved}
    return {**known, "text": "\n".join(text)}


def _times(one: Speed) -> str:
    return f"{one.times:.2f}" + (f" ({one.low:.2f} to {one.high:.2f})" if math.isfinite(one.low) else "")
