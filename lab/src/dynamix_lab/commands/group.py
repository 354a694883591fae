"""Shared by the commands under `dynamix bench`: the group, options, progress on stderr, lists as options, and the
command line that results record.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dynamix.cli.console import guarded, print_json
from dynamix.errors import ConfigError
from dynamix_lab.installed import need_bench

if TYPE_CHECKING:
    from dynamix_lab.harness.suite import Suite

Mechanism = Annotated[str, typer.Option(help="auto, privileged (root) or duty-cycle (no root).")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on in --out, without what it finished.")]
EXPERIMENTS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))}


class Bench(TyperGroup):
    """`bench NAME` runs a shipped experiment, as `bench experiment NAME` does."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        return super().resolve_command(ctx, ["experiment", *args] if args and args[0] in EXPERIMENTS else args)


bench = typer.Typer(cls=Bench, help="Measure dynamix itself.", no_args_is_help=True)


@bench.callback()
@guarded
def _bench(context: typer.Context) -> None:
    group: Any = context.command
    if not group.commands[context.invoked_subcommand].hidden:  # a removed one says so without any package
        need_bench("dynamix bench")


# These options decide where a result goes and how it is printed, not what it is; its recorded command omits them.
_NOT_OF_THE_RESULT = {"out", "as_json", "resume"}


def command_line(context: typer.Context) -> str:
    """The running command with all given options, recorded as its result's `command`.

    It omits --out, --resume and --json.
    """
    words: list[str] = []
    above: Any = context
    while above.parent is not None:
        words, above = [str(above.info_name), *words], above.parent
    words = ["dynamix", *words]  # the root's name varies with what started it: a script, `python -m`, a test
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in _NOT_OF_THE_RESULT and source is not None and source.name == "COMMANDLINE":
            words += _words(parameter, context.params[name])
    return " ".join(words)


def _words(parameter: Any, value: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return [shlex.quote(str(one)) for one in (value if isinstance(value, (list, tuple)) else [value])]
    if isinstance(value, bool):
        return [(parameter.opts if value else parameter.secondary_opts)[0]]
    return [parameter.opts[0], shlex.quote(str(value))]


def names_of(text: str | None) -> tuple[str, ...] | None:
    """A comma-separated list; None stays None.

    >>> names_of("static,dbs")
    ('static', 'dbs')
    """
    return None if text is None else tuple(text.split(","))


def numbers_of(name: str, text: str | None) -> tuple[int, ...] | None:
    """A comma-separated list of whole numbers. Raises `ConfigError` naming the option `name` for anything else.

    >>> numbers_of("workers", "8,32")
    (8, 32)
    """
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(name, text, "whole numbers, separated by commas", "correct the argument") from error


def floats_of(name: str, text: str | None) -> tuple[float, ...] | None:
    """A comma-separated list of numbers. Raises `ConfigError` naming the option `name` for anything else.

    >>> floats_of("step_ms", "1,2.5")
    (1.0, 2.5)
    """
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(name, text, "numbers, separated by commas", "correct the argument") from error


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr. Yields `tell(what, fraction done)`, which moves it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)


def conducted(
    context: typer.Context, suite: Suite, *, out: Path | None, resume: bool, as_json: bool, processes: int = 1
) -> dict[str, Any]:
    """Run a suite in its folder with progress on stderr, print its table or its result, return its result."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.harness.suite import run_suite

    suite.plan.check()
    with RunFolder(suite.name, out, resume=resume) as folder, progress(suite.name) as tell:
        result = run_suite(suite, folder, command=command_line(context), tell=tell, processes=processes)
    print_json(result) if as_json else typer.echo(suite.table(result))
    typer.echo(f"run folder: {folder.path}", err=as_json)
    return result


def about(context: typer.Context, cluster: str) -> dict[str, Any]:
    """A result's head without a run folder: schema, command, commit, machine, versions, and the given `cluster`."""
    from dynamix.events.records import SCHEMA
    from dynamix.events.run_folder import commit, machine, versions

    known = {"schema": SCHEMA, "command": command_line(context), "commit": commit(), "machine": machine()}
    return {**known, "versions": versions(), "cluster": cluster}
