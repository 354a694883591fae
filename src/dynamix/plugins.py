"""Loads plug-ins of other distributions by entry point: commands, policies, kinds of policy files, probes, rows of
`doctor`.

A plug-in that cannot be imported is left out with a message, and breaks nothing else. It cannot take a built-in's name,
nor that of a plug-in found before it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any

COMMANDS = "dynamix.commands"  # the words after `dynamix`: a function that typer can call, or a typer.Typer
POLICIES = "dynamix.policies"  # a policy's name: its factory
POLICY_FILES = "dynamix.policy_files"  # a file's `kind`: the class that loads it
PROBES = "dynamix.probes"  # a probe's name: its class
DOCTOR = "dynamix.doctor"  # an area of `dynamix doctor`: a function that returns its rows (name, available, detail)

# None of our packages is on an index, and the name `dynamix` there belongs to another project.
LABORATORY = "pip install ./lab  (in dynamix's source tree)"


def how_to_install(extra: str) -> str:
    """The command that installs an extra of dynamix-train.

    >>> how_to_install("cli")
    "pip install '.[cli]'  (in dynamix's source tree)"
    """
    return f"pip install '.[{extra}]'  (in dynamix's source tree)"


def plug_ins(
    group: str, built_in: Collection[str] = (), tell: Callable[[str], None] | None = None
) -> dict[str, EntryPoint]:
    """The plug-ins of a group by name, sorted by name; nothing is imported.

    built_in   names that no plug-in may take
    tell       receives one line for each plug-in that is left out; None: a RuntimeWarning
    """
    found: dict[str, EntryPoint] = {}
    for entry in _entries(group, tuple(sys.path)):
        if entry.name in built_in:
            (tell or _warn)(f"{named(entry)} is left out: {entry.name} is dynamix's own")
        elif entry.name in found:
            (tell or _warn)(f"{named(entry)} is left out: {named(found[entry.name])} has that name")
        else:
            found[entry.name] = entry
    return found


def load_all(group: str, built_in: Collection[str] = (), tell: Callable[[str], None] | None = None) -> dict[str, Any]:
    """The objects of a group's plug-ins by name, without those that cannot be imported."""
    found: dict[str, Any] = {}
    for name, entry in plug_ins(group, built_in, tell).items():
        try:
            found[name] = entry.load()
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            (tell or _warn)(f"{named(entry)} is left out: {why(error)}")
    return found


def named(entry: EntryPoint) -> str:
    """A plug-in's name and distribution, for messages."""
    owner = entry.dist.name if entry.dist is not None else "an unknown distribution"
    return f"{entry.name} of {owner}"


def why(error: BaseException) -> str:
    """An error in one line.

    >>> why(ValueError("a\\nb"))
    'ValueError: a b'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@functools.cache  # scanning all installed distributions takes milliseconds
def _entries(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    del path
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.dist.name if entry.dist else ""))


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
