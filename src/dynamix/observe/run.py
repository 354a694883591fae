"""The run folder of an observed job: how it is made, and the conclusions from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from dynamix.errors import ConfigError, StateError
from dynamix.events.records import SCHEMA, line_of, plain
from dynamix.events.run_folder import RunFolder, as_json
from dynamix.observe.command import check_command, run_command
from dynamix.observe.findings import Findings, find
from dynamix.observe.gains import Gains, Pays, predict
from dynamix.observe.hooks import CALLED, FOLDER_VARIABLE
from dynamix.observe.joined import Joined, join, windows
from dynamix.observe.pays import weigh
from dynamix.observe.words import tell, wrapped
from dynamix.startup.sitecustomize import called_environment
from dynamix.window import Window

_EMULATED = "DYNAMIX_EMULATED"  # every process of an emulation has this variable
LATEST_S = 10.0  # limit of rank 0's wait for the others' last rows


def conclude(folder: Path, **about: Any) -> dict[str, Any]:
    """Write events.jsonl, report.txt and result.json from what the ranks have written so far; returns the result.

    If one cannot be written, the result's `text` says so. Raises `StateError` if no rank has written a step.
    """
    job = join(folder)
    if not job.kept.any():
        raise StateError(f"{folder} holds {job.steps} steps: too few to say anything")
    found, told = find(job), list(windows(job))
    gains = predict([window for window, _ in told if job.predictable], sizes_known=job.samples_known)
    pays = weigh(job, found, gains)
    text = tell(job, found, gains, pays, about.get("exit_code"))
    result = {"schema": SCHEMA, "command": "observe", "cluster": cluster(), **about, **_result(job, found, gains, pays)}
    result |= {"text": text, "folder": str(folder)}
    unwritten: dict[str, str] = {}
    files = {"events.jsonl": _events(told), "report.txt": wrapped(text), "result.json": as_json(result)}
    for name, content in files.items():
        try:
            RunFolder.at(folder).write(name, content)
        except OSError as error:  # the disk is full, or the folder belongs to someone else: the report stays of use
            unwritten[name] = str(error.strerror)
    if unwritten:
        why = ", ".join(sorted(set(unwritten.values())))
        result["text"] += f"Note: in {folder} could not be written: {', '.join(unwritten)} ({why}).\n"
    return result


def _events(told: Sequence[tuple[Window, dict[str, Any]]]) -> str:
    """The lines of events.jsonl."""
    lines = []
    for index, (window, more) in enumerate(told):
        known = {"window_index": index, "window": window, "decision": "keep", "from_step": 0, "began_at": 0, **more}
        lines.append(line_of({**known, "allocation": window.batch_size.tolist()}).decode())
    return "".join(lines)


def cluster() -> str:
    """The hardware that the job runs on, as results name it."""
    return "emulator" if _EMULATED in os.environ else "cluster"


def _result(job: Joined, found: Findings, gains: Gains, pays: Pays) -> dict[str, Any]:
    of_job = ("ranks", "world", "missing", "unfinished", "steps", "pauses")
    of_found = ("verdict", "rank", "part", "step_s", "busy_s", "wait_s", "parts", "slow_link", "link_ratio")
    told = {name: getattr(job, name) for name in of_job} | {name: getattr(found, name) for name in of_found}
    slow = None if found.slow is None else dataclasses.asdict(found.slow)
    told |= {"exchange_s": found.transfer_s, "slow": slow}
    return dict(plain(told | {"gains": dataclasses.asdict(gains) | dataclasses.asdict(pays)}))


def say(folder: Path, out: TextIO | None = None, **about: Any) -> dict[str, Any] | None:
    """`conclude`, and print its text on stderr; if there is nothing to conclude from, print that and return None."""
    out = out or sys.stderr
    try:
        result = conclude(folder, **about)
    except Exception as error:  # a report must not end the job, nor change its exit code
        why = error if isinstance(error, StateError | OSError) else repr(error)
        print(f"dynamix observe: {why}", file=out, flush=True)
        return None
    print(f"\ndynamix observe: {wrapped(result['text'])}(run folder: {folder})", file=out, flush=True)
    return result


def wait_for_others(folder: Path, patience_s: float = LATEST_S) -> None:
    """Wait until all ranks have ended, but no longer than `patience_s`."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        with contextlib.suppress(Exception):  # files that are being written
            job = join(folder)
            if not job.missing and not job.unfinished:
                return
        time.sleep(0.1)


def observe(
    command: Sequence[str], *, out: str | Path | None = None, every_s: float | None = None, echo: TextIO | None = None
) -> dict[str, Any]:
    """Run `command`, observe all its ranks, and return the content of result.json, with its `exit_code`.

    out       run folder, new or empty; None: under `runs`
    every_s   seconds between reports; None: only one at the end

    If the command trained nothing that can be observed, that is reported, and `text` is empty.
    """
    check_command(command, "observe")
    if every_s is not None and not every_s > 0:
        raise ConfigError("every", every_s, "more than 0 seconds", "leave it out for one report at the end")
    with RunFolder("observe", out) as run:
        run.write_run(command="observe", job=list(command), cluster=cluster())
        # Every Python of the job is observed, from before an emulated device's pacing, whichever was requested first.
        env = called_environment({**os.environ, FOLDER_VARIABLE: str(run.path.resolve())}, CALLED, first=True)
        code = run_command(command, env, every_s=every_s, tell=lambda _: say(run.path, echo))
    about = {"job": list(command), "exit_code": code}
    nothing = {"schema": SCHEMA, "command": "observe", **about, "text": "", "folder": str(run.path)}
    return say(run.path, echo, **about) or nothing


def read(folder: Path) -> dict[str, Any]:
    """Conclude again from a run folder. Files of other machines may have been added to `ranks/`."""
    if not (folder / "ranks").is_dir():
        raise ConfigError("folder", str(folder), "the folder of an observed run", "pass the folder that --out named")
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return conclude(folder, **{name: known[name] for name in ("job", "exit_code", "cluster") if name in known})
