"""Finds runs: an events file, a run folder, or a folder of such folders."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError, StateError
from dynamix.events.run_folder import row_folder
from dynamix.telemetry.reading import EventFollower, Recorded
from dynamix.telemetry.run import RunView
from dynamix.telemetry.sentences import percent, seconds

EVENTS = "events.jsonl"
MOST_RUNS = 64  # on one page
MOST_OVERRUNS = 0.01  # part of an emulated device's steps; above it, the machine was too slow for the device
STALE_S = 60.0  # a run whose last line is older is said to be killed, or to hang
_LABELS = ("policy", "seed", "attempt")  # identify the lines of a run in a file of several
_TAIL_BYTES = 2**16


class RunSource:
    """An events file and its folder's facts; `refresh` reads what was written since.

    views    the runs in the file, by name: a demo writes many into one
    absent   why a comparison lacks this run; empty if it has it
    run, result   contents of run.json and result.json; empty if missing or damaged
    """

    def __init__(self, events: Path, name: str, *, absent: str = "") -> None:
        self.events, self.name, self.absent = events, name, absent
        self.folder = events.parent if events.name == EVENTS else None
        self.follower = EventFollower(events)
        self.views: dict[str, RunView] = {}
        self.run: dict[str, Any] = {}
        self.result: dict[str, Any] = {}
        self._current: dict[str, str] = {}  # label -> name of the view that receives its lines
        self.version = 0

    def refresh(self, most_bytes: int | None = None) -> bool:
        """Read what is new, in a long file the next `most_bytes`; returns whether anything was."""
        if self.absent:
            return False
        before = self.follower.read, bool(self.result)
        self.run = self.run or _json(self.folder, "run.json")
        for line in self.follower.more(most_bytes):
            self._forget_what_was_replaced()
            if (view := self._view(line)) is not None:
                view.add(line)
        self._forget_what_was_replaced()
        for view in self.views.values():
            view.settle()
        self.result = self.result or _json(self.folder, "result.json")
        changed = before != (self.follower.read, bool(self.result))
        self.version += changed
        return changed

    def _forget_what_was_replaced(self) -> None:
        if self.follower.shrunk:
            self.views, self._current, self.follower.shrunk = {}, {}, False

    @property
    def ended(self) -> bool:
        """Whether its folder has a result."""
        return bool(self.result)

    @property
    def quiet_s(self) -> float:
        """Seconds since its last line was written."""
        try:
            return max(time.time() - self.events.stat().st_mtime, 0.0)
        except OSError:
            return 0.0

    def missing(self) -> list[str]:
        """The missing parts that a reader of the page should know, as sentences."""
        if self.absent:
            return []
        said = self.follower.problems()
        if behind := self.follower.behind_bytes:
            said.append(f"{self.events.name} is still being read: {behind / 1e6:,.0f} MB are left.")
        if self.run and not self.result:
            if self.quiet_s < STALE_S:
                said.append("The run is still being written: there is no result.json yet.")
            else:
                ago = seconds(self.quiet_s)
                said.append(f"There is no result.json and the last line is {ago} old: the run was killed, or hangs.")
        hidden = len(self._current) - len(self.views)
        if hidden > 0:
            said.append(f"{hidden} more runs are in the file; a page shows {MOST_RUNS}.")
        return said + self._ranks_not_observed() + self._ranks_that_failed()

    @property
    def overran(self) -> list[float]:
        """The part of each emulated device's steps that ended late, by rank; empty without devices."""
        steps = self.result.get("device_steps")
        try:
            return [row["overruns"] / max(row["steps"], 1) for row in steps or ()]
        except (KeyError, TypeError):
            return []

    @property
    def unfit(self) -> str:
        """Why the times of its runs are no valid measurement; empty if nothing is known against them."""
        code = self.result.get("exit_code")
        if max(self.overran, default=0.0) > MOST_OVERRUNS:
            most = f"{percent(max(self.overran))} of a rank's device steps overran"
            return f"{most}, more than {percent(MOST_OVERRUNS)}: this machine is too slow or too busy"
        return f"it ended with exit code {code}" if type(code) is int and code else ""

    def _ranks_not_observed(self) -> list[str]:
        """Sentences on the ranks of an observed job that are missing in whole or in part."""
        said = []
        for name, what in (("missing", "wrote nothing"), ("unfinished", "never said that it ended: it died, or runs")):
            ranks = self.result.get(name)
            if self.result.get("command") != "observe" or not isinstance(ranks, list) or not ranks:
                continue
            shown = ", ".join(map(str, ranks[:MOST_RUNS])) + (" and others" if len(ranks) > MOST_RUNS else "")
            said.append(f"Rank {shown} {what}." if len(ranks) == 1 else f"Each of these ranks {what}: {shown}.")
        return said

    def curve(self, view: RunView) -> list[list[float]] | None:
        """Held-out scores of one of its runs, [time_s, samples, score] each, if result.json has them."""
        rows, seeds = self.result.get("policies"), self.result.get("seeds")
        label = next((label for label, name in self._current.items() if name == view.name), "")
        policy, seed = (json.loads(label) if label else [None] * 2)[:2]
        try:
            curve = rows[policy]["curve"][seeds.index(seed)]  # type: ignore[index,union-attr]
            return [[float(value) for value in point[:3]] for point in curve if len(point) >= 3]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None

    def _view(self, line: Recorded) -> RunView | None:
        label = json.dumps([line.fields.get(name) for name in _LABELS], default=str)
        name = self._current.get(label)
        if name is not None and name not in self.views:
            return None  # more runs than a page shows
        if name is None or self.views[name].is_another(line.fields):
            name = self._name(line.fields, label)
            self._current[label] = name
            if len(self.views) < MOST_RUNS:
                self.views[name] = RunView(name)
        return self.views.get(name)

    def _name(self, fields: Mapping[str, Any], label: str) -> str:
        parts = [str(fields["policy"])] if fields.get("policy") is not None else []
        parts += [f"seed {fields['seed']}"] if fields.get("seed") is not None else []
        parts += [f"attempt {fields['attempt']}"] if fields.get("attempt", 1) not in (None, 1) else []
        name = ", ".join(parts) or self.name
        again, unique = 2, name
        while unique in self.views:
            unique, again = f"{name} ({again})", again + 1
        return unique

    def _ranks_that_failed(self) -> list[str]:
        codes = self.result.get("exit_codes")
        if not isinstance(codes, list):
            return []
        failed = [(rank, code) for rank, code in enumerate(codes) if isinstance(code, int) and code]
        said = [f"Rank {rank} ended with {_exit(code)}{self._last_words(rank)}." for rank, code in failed[:8]]
        return said + ([f"{len(failed) - 8} more ranks failed."] if len(failed) > 8 else [])

    def _last_words(self, rank: int) -> str:
        seeds = self.result.get("seeds") or [0]
        if self.folder is None or not isinstance(seeds, list):
            return ""
        path = self.folder / "ranks" / str(seeds[0]) / f"rank{rank}.err"
        try:
            with path.open("rb") as file:
                file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        errors = [line.strip() for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
        return f": {errors[-1][:300]}" if errors else ""


def find_sources(paths: Iterable[str | os.PathLike[str]]) -> list[RunSource]:
    """The runs at the given paths. Raises `ConfigError` if a path has none.

    A path is an events file, a folder with `events.jsonl`, or a folder whose sub-folders have one, such as that of
    `dynamix emulate --compare`, whose order is kept.
    """
    found = [source for path in paths for source in _sources_of(Path(path))]
    if not found:
        raise ConfigError("RUN", "", "one run or more", "name a run folder")
    names = [source.name for source in found]
    for source in found:
        if names.count(source.name) > 1:
            source.name = str(source.events.parent)
    return found


def _sources_of(path: Path) -> list[RunSource]:
    if path.is_file():
        return [RunSource(path, path.parent.resolve().name if path.name == EVENTS else path.stem)]
    if (path / EVENTS).exists():
        return [RunSource(path / EVENTS, path.resolve().name)]
    asked = _json(path, "run.json").get("compare")
    if isinstance(asked, list) and asked:
        return _compared(path, [str(name) for name in asked])
    if inside := sorted(path.glob(f"*/{EVENTS}")):
        return [RunSource(events, events.parent.name) for events in inside]
    if (path / "run.json").exists():  # a run before its first window
        return [RunSource(path / EVENTS, path.resolve().name)]
    kinds = "an events file, or a folder that holds events.jsonl or whose sub-folders do"
    allowed = kinds if path.exists() else "a path that exists, and this one does not"
    raise ConfigError("RUN", str(path), allowed, "name what a run has written, such as runs/emulate-TIME")


def _compared(path: Path, names: list[str]) -> list[RunSource]:
    """The rows of a comparison, in its order."""
    rows = _json(path, "result.json").get("rows")
    rows = rows if isinstance(rows, dict) else {}
    found = []
    for name in names:
        done = rows.get(name)
        why = done.get("available", "") if isinstance(done, dict) else ""
        events = path / row_folder(name) / EVENTS
        found.append(RunSource(events, name, absent=why if isinstance(why, str) else ""))
    return found


def require_some(sources: Sequence[RunSource]) -> None:
    """Raise `StateError` if no source has a window."""
    if not any(source.views for source in sources):
        why = "; ".join(dict.fromkeys(said for source in sources for said in source.missing()))
        raise StateError(f"{why or 'no window was written yet'}; give a run folder or its events.jsonl")


def _json(folder: Path | None, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8")) if folder is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
