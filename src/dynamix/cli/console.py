"""Options, one-line errors and JSON alone on stdout: all commands share them."""

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from dynamix.errors import DynamixError, UsageError
from dynamix.removed import message

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option(help="Run folder, new or empty (default: runs/COMMAND-TIME).")]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
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


ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def gone(fix: str) -> Callable[[], None]:
    """A command of an earlier version, which says what to write now, and ends with exit code 2."""

    @guarded
    def command() -> None:
        raise UsageError(message(fix))

    return command


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def print_json(result: dict[str, Any]) -> None:
    """The result of --json."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False))
