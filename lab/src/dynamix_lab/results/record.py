"""Stored results: `results/NAME-DATE/{result.json, command, machine.json, table.md}` of the repository.

A result is copied from the folder of a finished run. It is refused if it cannot be reproduced from its own record:
without its command, without a commit, or from a changed source tree.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix.events.records import SCHEMA

NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
KEYS = ("schema", "command", "commit", "cluster", "machine")
COMPARING = ("seeds", "target", "policies", "ratios", "mechanisms", "scenario_sha256")
"""Fields that results with policies have in addition to `KEYS`."""
EDITABLE = "pip install -e . -e ./homomorphic -e './lab[bench]'"


def record(folder: Path, name: str, *, results: Path = Path("results"), changed: bool = False) -> Path:
    """Copy the finished run in `folder` to results/NAME-DATE. Returns the new folder.

    name      in lower case, with hyphens; the date is that of the run's start
    changed   accept a source tree with uncommitted changes; machine.json records that

    Raises `ConfigError` for a folder without a finished run, for a result with missing fields, and if the new folder
    exists.
    """
    if not NAME.fullmatch(name):
        raise ConfigError("as", name, "a name in lower case letters, digits and hyphens", "say demo")
    result, run = (_read(folder / file) for file in ("result.json", "run.json"))
    check(result, changed=changed)
    target = results / f"{name}-{run['started'][:10]}"
    if target.exists():
        raise ConfigError("as", str(target), "a name that is not there yet", "remove the old result, or take another")
    target.mkdir(parents=True)
    (target / "result.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (target / "command").write_text(f"{result['command']}\n", encoding="utf-8")
    about = json.dumps(machine_of(result, run), indent=1, allow_nan=False)
    (target / "machine.json").write_text(f"{about}\n", encoding="utf-8")
    if (table := folder / "table.md").exists():
        shutil.copyfile(table, target / table.name)
    return target


def check(result: Mapping[str, Any], *, changed: bool = False) -> None:
    """Raise `ConfigError` for a result that cannot be stored, naming what it lacks."""
    needed = KEYS + (COMPARING if "policies" in result else ())
    for name in needed:
        if name not in result:
            raise ConfigError("result.json", f"without {name}", ", ".join(needed), "run the command again")
    command, commit = str(result["command"]), result["commit"]
    if result["schema"] != SCHEMA:
        raise ConfigError("schema", result["schema"], str(SCHEMA), "run the command again")
    if not re.match(r"(dynamix |scripts/)\S", command):
        allowed = "the whole command line, dynamix ... or scripts/..."
        raise ConfigError("command", command, allowed, "run it from the command line")
    if not commit:
        allowed = "the commit of a source tree: only an install with -e from a git repository knows it"
        raise ConfigError("commit", commit, allowed, f"{EDITABLE}, then run the command again")
    if str(commit).endswith("-dirty") and not changed:
        allowed = "the commit of an unchanged source tree"
        raise ConfigError("commit", commit, allowed, "commit what is changed and run it again, or say --changed")
    if result.get("interrupted"):
        raise ConfigError("result.json", "interrupted", "a run that ended", "go on with --resume")
    for where, text in _texts(result):
        if text.startswith(("/", "~")) and len(text) > 1:
            raise ConfigError(where, text, "no path of this machine", "run it with relative paths")


def machine_of(result: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """machine.json: the host and its load at the start from run.json, the commit, and whether files were changed."""
    host = run.get("host") or {
        **run["machine"],
        "python": run["versions"]["python"],
        "torch": run["versions"].get("torch"),
    }
    commit = str(result["commit"])
    return {**host, "commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}


def newest(path: str, root: Path) -> Path | None:
    """The folder of `path`, relative to `root`: results/NAME-DATE, or results/NAME-* for the newest of a name.

    None if there is no result of that name yet.
    """
    if not path.endswith("-*"):
        return root / path
    dated = re.compile(re.escape(Path(path).name[:-1]) + r"\d{4}-\d{2}-\d{2}")
    found = sorted(p for p in (root / path).parent.glob("*") if dated.fullmatch(p.name))
    return found[-1] if found else None


def load(path: str, root: Path) -> dict[str, Any] | None:
    """result.json of the folder that `newest` finds. Raises `ConfigError` for a folder without a result."""
    folder = newest(path, root)
    return None if folder is None else result_of(folder)


def result_of(folder: Path) -> dict[str, Any]:
    """result.json of a folder. Raises `ConfigError` for a folder without a result."""
    return _read(folder / "result.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("folder", str(path.parent), f"one that holds {path.name}", "name a finished run") from error
    except ValueError as error:
        raise ConfigError("folder", str(path), f"JSON ({error})", "run the command again") from error
    if not isinstance(content, dict):
        raise ConfigError("folder", str(path), "a JSON object", "run the command again")
    return content


def _texts(value: Any, where: str = "result") -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, with its place."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(part, f"{where}.{name}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _texts(part, f"{where}[{i}]")
