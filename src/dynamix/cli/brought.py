"""Commands of other distributions, by entry point, and messages about those that are missing."""

from typing import Any

import typer

from dynamix.cli.console import ANYTHING, refusing
from dynamix.plugins import COMMANDS, LABORATORY, load_all, named, plug_ins, why

_HOMOMORPHIC = "pip install './homomorphic[cli]'  (in dynamix's source tree)"
_ELSEWHERE = {
    "aggregator": ("Add gradients in the network, for many jobs.", "dynamix-homomorphic", _HOMOMORPHIC),
    "bench": ("Measure dynamix itself.", "dynamix-lab", LABORATORY),
    "demo": ("Train on an emulated uneven cluster under several policies.", "dynamix-lab", LABORATORY),
    "emulate": ("Run any training script on emulated hosts.", "dynamix-lab", LABORATORY),
    "policy evaluate": ("Score a policy on simulated clusters.", "dynamix-lab", LABORATORY),
    "policy train": ("Learn a policy in the simulator.", "dynamix-lab", LABORATORY),
}


def add_commands_of_others(app: typer.Typer) -> None:
    """Add the commands of entry points. A name of several words goes into an existing group, such as `policy train`.

    A plug-in is a function that typer can call, or a `typer.Typer`; one with a single command becomes that command,
    with its settings. A command that is left out is named in one line on stderr.
    """
    own = _names(typer.main.get_command(app))
    for name, command in load_all(COMMANDS, own, _say).items():
        *groups, last = name.split(" ")
        above = _group(app, groups)
        wrong = "no such group" if above is None else _wrong(last, command)
        if above is None or wrong:
            _say(f"{named(plug_ins(COMMANDS, own, lambda _: None)[name])} is left out: {wrong}")
        else:
            _add(above, last, command)
    there = _names(typer.main.get_command(app))
    for name, (what, owner, install) in _ELSEWHERE.items():
        *groups, last = name.split(" ")
        above = _group(app, groups)
        if name not in there and above is not None:
            above.command(last, help=f"{what} Needs {owner}.", context_settings=ANYTHING)(
                refusing(f"dynamix {name} is part of {owner}: {install}")
            )


def _names(group: Any, before: str = "") -> set[str]:
    """Every command and group in `group`, by the words that call it."""
    found = set()
    for name, command in getattr(group, "commands", {}).items():
        found |= {before + name} | _names(command, f"{before}{name} ")
    return found


def _group(app: typer.Typer, words: list[str]) -> typer.Typer | None:
    """The group with these words; None if there is none."""
    for word in words:
        inside = [group.typer_instance for group in app.registered_groups if group.name == word]
        if not inside or inside[0] is None:
            return None
        app = inside[0]
    return app


def _add(app: typer.Typer, name: str, command: Any) -> None:
    single = _single(command)
    if single is not None:
        app.command(name, context_settings=single.context_settings)(single.callback)
    elif isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _single(command: Any) -> Any:
    """The single command of a `typer.Typer` without a callback; else None."""
    if not isinstance(command, typer.Typer) or command.registered_groups or command.registered_callback is not None:
        return None
    return command.registered_commands[0] if len(command.registered_commands) == 1 else None


def _wrong(name: str, command: Any) -> str:
    """Why this is no command; empty if it is one. typer accepts anything, and fails when any command is called."""
    if not isinstance(command, typer.Typer) and (not callable(command) or isinstance(command, type)):
        return f"{type(command).__name__} is neither a function nor a typer.Typer"
    tried = typer.Typer()
    tried.command("another")(refusing("another"))  # so that it is a group, whatever is added
    try:
        _add(tried, name, command)
        typer.main.get_command(tried)
    except Exception as error:  # third-party code may raise anything
        return why(error)
    return ""


def _say(text: str) -> None:
    typer.echo(f"dynamix: plug-in {text}", err=True)
