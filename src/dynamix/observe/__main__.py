"""`torchrun ... -m dynamix.observe train.py ARGUMENTS`: runs the script as it is, and tells what its steps wait for."""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import runpy
import subprocess
import sys
from pathlib import Path

from dynamix.errors import ConfigError, DynamixError

FOLLOW = "--follow"  # starts the process that reports for rank 0 during training


def main(given: list[str] | None = None) -> None:
    """Run the command line."""
    arguments = sys.argv[1:] if given is None else given
    if arguments[:1] == [FOLLOW]:
        follow(Path(arguments[1]), float(arguments[2]))
        return
    asked = parser().parse_args(arguments)
    if not asked.script:
        parser().error("name the script to run: torchrun ... -m dynamix.observe train.py")
    if asked.every is not None and not asked.every > 0:
        parser().error("--every must be more than 0 seconds")
    folder = asked.out or default_folder()
    rank = int(os.environ.get("RANK", "0"))
    try:
        make(folder, rank, asked.script)
    except DynamixError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except OSError as error:
        print(f"dynamix observe: cannot write to {folder} ({error}): the script runs unobserved", file=sys.stderr)
        play(asked)
        return
    run(folder, rank, asked)


def parser() -> argparse.ArgumentParser:
    """The parser: options come before the script, and everything after it belongs to the script."""
    parser = argparse.ArgumentParser(prog="python -m dynamix.observe", description=__doc__)
    parser.add_argument("--out", type=Path, help="run folder that all machines can see (default: runs/observe-TIME)")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="seconds between reports, besides the last")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as python -m runs it")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...")
    return parser


def default_folder() -> Path:
    """A folder that is the same for all ranks of one machine: named by the start time of their parent process."""
    import psutil

    parent = psutil.Process(os.getppid() if "RANK" in os.environ else os.getpid())
    began = datetime.datetime.fromtimestamp(parent.create_time(), datetime.UTC)
    return Path("runs") / f"observe-{began:%Y%m%d-%H%M%S}-{parent.pid}"


def make(folder: Path, rank: int, script: list[str]) -> None:
    """Let rank 0 make the folder. All ranks refuse one that an earlier job has written to."""
    from dynamix.events.run_folder import RunFolder
    from dynamix.observe.run import cluster

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (folder / "ranks" / attempt / f"rank{rank}.json").exists():
        raise ConfigError("out", str(folder), "a new or empty folder", "choose another, or remove this one")
    if rank == 0 and attempt == "0":
        folder.mkdir(parents=True, exist_ok=True)
        RunFolder.at(folder).write_run(command="observe", job=script, cluster=cluster())


def run(folder: Path, rank: int, asked: argparse.Namespace) -> None:
    """Run the script under observation; at the end rank 0 reports."""
    from dynamix.observe import hooks
    from dynamix.observe.never_fatal import never_fatal
    from dynamix.startup.sitecustomize import after_import

    after_import("torch", functools.partial(hooks.start, folder=str(folder.resolve())))
    speaker = _speaker(folder, asked.every) if rank == 0 and asked.every else None
    folder = folder.resolve()  # the script may change the working directory
    try:
        play(asked)
    finally:
        if speaker is not None:
            speaker.communicate()  # closes its standard input
        if hooks.watch is not None:
            never_fatal(hooks.watch, hooks.watch.stop)()
        if rank == 0:
            from dynamix.observe.run import say, wait_for_others

            trained = hooks.watch is not None and hooks.watch.recorder is not None
            if trained and sys.exc_info()[0] in (None, SystemExit):
                wait_for_others(folder)
            say(folder)


def play(asked: argparse.Namespace) -> None:
    """Run the script as Python would."""
    sys.argv = asked.script
    if asked.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(asked.script[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(asked.script[0]).resolve().parent)
        runpy.run_path(asked.script[0], run_name="__main__")


def _speaker(folder: Path, every_s: float) -> subprocess.Popen[bytes]:
    """Start a process that reports while this rank trains, and ends with it."""
    command = [sys.executable, "-m", "dynamix.observe", FOLLOW, str(folder.resolve()), str(every_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def follow(folder: Path, every_s: float) -> None:
    """Report at intervals until the standard input ends. Runs at the lowest priority."""
    import select

    from dynamix.observe.run import say

    os.nice(19)
    while not select.select([sys.stdin], [], [], every_s)[0]:
        say(folder)


if __name__ == "__main__":
    main()
