"""`dynamix emulate SCENARIO --compare ROWS -- COMMAND`: one script under several policies, set by its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix.events.records import SCHEMA, each_event
from dynamix.events.run_folder import RunFolder, row_folder
from dynamix.runtime.config import OUTSIDE
from dynamix_lab.emulator.launchers import check_command
from dynamix_lab.emulator.run import emulate, worst

ROW_VARIABLE = "DYNAMIX_ROW"  # the folder of a script's row, for its files
ROW_MARK = "{row}"  # the same in a command's arguments
LOCAL = "local"  # local steps: shares by speed, models are averaged
_AT_A_MEETING = "controller.met"  # named by the error of a loop that calls collectives between averagings
_TAIL_BYTES = 2**16


@dataclass(frozen=True)
class ComparedRow:
    """A run of the comparison: its name, and the arguments of `Controller` that it overrides in the script.

    >>> ComparedRow.of("local").environment
    {'DYNAMIX_POLICY': 'lb_bsp', 'DYNAMIX_MEET': 'parameters'}
    >>> ComparedRow.of("goodput:adaptive:auto").told
    {'policy': 'goodput', 'meet': 'auto', 'global_batch': 'adaptive'}
    """

    name: str
    policy: str
    meet: str | None = None  # None: as in the script
    global_batch: str | None = None

    @classmethod
    def of(cls, name: str) -> ComparedRow:
        """`local`, or the name of a policy, optionally followed by `:adaptive`, `:auto` or both."""
        if name == LOCAL:
            return cls(name, "lb_bsp", "parameters")
        rest = name.removesuffix(":auto")
        policy = rest.removesuffix(":adaptive")
        return cls(name, policy, "auto" if rest != name else None, "adaptive" if policy != rest else None)

    @property
    def told(self) -> dict[str, str]:
        """The overridden arguments of `Controller`."""
        known = {"policy": self.policy, "meet": self.meet, "global_batch": self.global_batch}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {OUTSIDE[name]: value for name, value in self.told.items()}


def rows_of(text: str) -> list[ComparedRow]:
    """Parse comma-separated names of rows. Raises `ConfigError` for none, and for two with the same folder.

    >>> [row.policy for row in rows_of("static,local,dynamix")]
    ['static', 'lb_bsp', 'dynamix']
    """
    rows = [ComparedRow.of(name.strip()) for name in text.split(",") if name.strip()]
    folders = [row_folder(row.name) for row in rows]
    if not rows or len(set(folders)) < len(folders):
        allowed = "names of policies (NAME, NAME:adaptive, NAME:auto, NAME:adaptive:auto), or local, each once"
        raise ConfigError("compare", text, allowed, "such as --compare static,local,dynamix")
    return rows


def compare(
    scenario: Any,
    command: Sequence[str],
    rows: Sequence[ComparedRow],
    *,
    out: str | Path | None = None,
    tell: Callable[[str], None] = lambda said: None,
    **options: Any,
) -> dict[str, Any]:
    """Run `command` once for each row, one after another on fresh hosts. Returns the contents of result.json.

    Each row has its own run folder inside `out`. The script gets its path in place of `{row}` in the command, and as
    DYNAMIX_ROW. If rows shared checkpoints, one row would resume from another's. `options` are those of `emulate`. If
    the script cannot run a row, that is not a failure: its `available` says why. `exit_code` is the worst of the other
    rows. If the script fails in the first row before its first window, the other rows are not run.
    """
    check_command(command)
    with RunFolder("emulate", out) as folder:
        found: dict[str, dict[str, Any]] = {}
        asked = {"command": "emulate", "compare": [row.name for row in rows], "job": list(command)}
        folder.write_run(**asked)
        for row in rows:
            tell(row.name)
            place = folder.path / row_folder(row.name)
            done = emulate(
                scenario,
                [word.replace(ROW_MARK, str(place.resolve())) for word in command],
                out=place,
                env={**row.environment, ROW_VARIABLE: str(place.resolve())},
                described=row.told,
                **options,
            )
            found[row.name] = {**done, "available": availability(done, row)}
            if row is rows[0] and done["exit_code"] and found[row.name]["available"] is True and not _began(done):
                why = f"not run: under {row.name} the script failed before its first window"
                found |= {other.name: {"policy": other.policy, "available": why} for other in rows[1:]}
                break
    codes = [done["exit_code"] for done in found.values() if done["available"] is True]
    shared = ("cluster", "mechanisms", "scenario", "scenario_sha256", "hosts", "device", "seeds")
    facts = {name: next(iter(found.values()))[name] for name in shared}
    result = {"schema": SCHEMA, **asked, **facts, "exit_code": worst(codes) if codes else 1}
    result |= {"rows": found, "folder": str(folder.path)}
    folder.write_result(result)
    return result


def _began(done: Mapping[str, Any]) -> bool:
    """Whether a run has closed a full window. A short one, of the steps before it failed, does not count."""
    events = _events_of(done)
    return events.exists() and any(not event.get("short") for event in each_event(events))


def _events_of(done: Mapping[str, Any]) -> Path:
    return Path(done["folder"]) / "events.jsonl"


def availability(done: Mapping[str, Any], row: ComparedRow) -> bool | str:
    """True, or the reason why the script could not run this row."""
    folder = Path(done["folder"])
    if row.meet == "parameters" and done["exit_code"] and _names_meetings(folder):
        return "not available: the loop has to save, evaluate and call collectives at meetings, `if controller.met:`"
    if not done["exit_code"] and not _events_of(done).exists():
        why = "makes no dynamix.Controller, or trained nothing (did it go on from another row's last checkpoint?)"
        return f"not available: the script {why}"
    return True


def _names_meetings(folder: Path) -> bool:
    for path in sorted(folder.glob("ranks/*/rank*.err")):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            said = file.read().decode(errors="replace")
        if _AT_A_MEETING in said and "UsageError" in said:
            return True
    return False
