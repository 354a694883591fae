"""What all commands share: options, one-line errors, and JSON alone on stdout."""

import errno
import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamix.errors import ConfigError, DynamixError, UsageError
from dynamix.removed import message

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option(help="Run folder, new or empty (default: runs/COMMAND-TIME).")]
Command = Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="A program and its arguments.")]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # the disk takes no more, or nothing at all


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Our errors, and a full disk, become one line and exit code 2.

    SIGTERM unwinds like Ctrl-C, so that nothing is left running.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            command(*args, **kwargs)
        except (DynamixError, OSError) as error:
            if not isinstance(error, DynamixError) and error.errno not in _FULL:
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("error: interrupted", err=True)
            raise typer.Exit(130) from error
        finally:
            signal.signal(signal.SIGTERM, before)

    return run


def read_token(file: Path | None) -> str:
    """The token in a file, "" without a file; warns if others may read the file.

    Raises `ConfigError` if it cannot be read or is empty.
    """
    if file is None:
        return ""
    try:
        token, mode = file.read_text(encoding="utf-8").strip(), file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("token_file", str(file), "a text file that can be read", str(error)) from error
    if not token:
        raise ConfigError("token_file", str(file), "a token of 16 characters or more", "it is empty")
    if mode & 0o077:
        typer.echo(f"warning: others on this machine may read the token: chmod 600 {file}", err=True)
    return token


ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def gone(fix: str) -> Callable[[], None]:
    """A command of an earlier version, which says what to write now."""
    return refusing(message(fix))


def refusing(text: str) -> Callable[[], None]:
    """A command that only says this, as an error with exit code 2."""

    @guarded
    def command() -> None:
        raise UsageError(text)

    return command


def print_json(result: dict[str, Any]) -> None:
    """Print the result of --json."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False))
