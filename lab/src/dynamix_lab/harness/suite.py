"""One harness for every suite: a plan, its cells, resuming, progress, a result.

A suite defines its plan, the plan's cells, how one cell is run, and the conclusions from all cells. The harness does
the rest: it refuses a folder that has another plan, runs the missing cells, stores each when it ends, reports progress,
and writes result.json, table.md and report.html.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from dynamix.errors import ConfigError, StateError
from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.harness.folder import read_run
from dynamix_lab.harness.host import host
from dynamix_lab.harness.processes import in_processes

Tell = Callable[[str, float], None]
"""Reports progress: the present activity, and the fraction done, 0 to 1."""


def untold(what: str, done: float) -> None:
    """A `Tell` that does nothing."""


def part_of(tell: Tell, index: int, parts: int) -> Tell:
    """A function that reports the progress of part `index` of `parts` equal ones."""
    return lambda what, done: tell(what, (index + done) / parts)


@dataclass(frozen=True, slots=True)
class Cell:
    """The smallest part of a suite that is stored.

    key    names its file in `cells/` of the run folder; unique in the plan
    what   what the suite needs to run it
    """

    key: str
    what: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """The services that a cell may use while it runs.

    folder   of the run; a cell's other files there need unique names
    found    results of the finished cells, by key
    tell     reports progress of this cell
    means    from `Suite.means`
    """

    folder: RunFolder
    found: Mapping[str, dict[str, Any]]
    tell: Tell
    means: Any = None


class Suite(ABC):
    """What a suite implements for the harness. All results of cells are plain JSON.

    name    of its command, and of the run folder
    plan    checked before anything runs; a folder can only be resumed with an equal one
    grows   fields of the plan that a later call on the same folder may change, because they only add or omit cells
    """

    name: str
    plan: Any
    grows: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts before the first cell: `cluster`, `seeds`, `scenario_sha256` and others for the result."""

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """The cells in the order of running. A cell may need the results of earlier ones."""

    @abstractmethod
    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        """Run one cell."""

    @abstractmethod
    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """The conclusions from all cells: `target`, `policies`, `ratios` and others for the result."""

    @abstractmethod
    def table(self, result: Mapping[str, Any]) -> str:
        """The text of table.md."""

    def page(self, result: Mapping[str, Any]) -> str | None:
        """The text of report.html, for suites that have one."""
        return None

    def bound_to(self) -> dict[str, Any]:
        """Facts that must be unchanged when a folder is resumed, e.g. the commit if times are compared."""
        return {}

    def begin(self, found: Mapping[str, Any]) -> None:  # noqa: B027 - few suites have something to do here
        """Called once before the first cell runs, with the results that are already in the folder."""

    def means(self, folder: RunFolder) -> contextlib.AbstractContextManager[Any]:
        """Resources that cells share, such as processes: opened before the first cell, closed after the last."""
        return contextlib.nullcontext()

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """The finished cells from which conclusions are possible; none if there are too few."""
        return found

    def keeps(self, found: Mapping[str, Any]) -> bool:
        """Whether a cell's result is final. If not, the cell is run again when the folder is resumed."""
        return True


def run_suite(
    suite: Suite, folder: RunFolder, *, command: str | None = None, tell: Tell = untold, processes: int = 1
) -> dict[str, Any]:
    """Run the cells that `folder` lacks. Writes and returns result.json.

    command     the command line, for the result
    processes   that run cells in parallel; more than one only if the suite's cells do not need each other

    After an interrupt it concludes from the finished cells and re-raises `KeyboardInterrupt`. Raises `ConfigError` for
    a bad plan and for a folder with another plan.
    """
    suite.plan.check()
    plan = json.loads(json.dumps(asdict(suite.plan), default=str))
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command or f"dynamix bench {suite.name}",
        **suite.facts(),
        "plan": plan,
        "plan_sha256": plan_sha256(plan, without=suite.grows),
    }
    bound = json.loads(json.dumps(suite.bound_to()))
    _refuse_another(suite, folder, facts, bound)
    folder.write_run(**facts, host=host(), bound_to=bound)
    cells = suite.cells()
    found = {cell.key: _read(_file(folder, cell)) for cell in cells if _file(folder, cell).exists()}
    suite.begin(found)
    try:
        for cell, content in _played(suite, cells, found, folder, tell, processes):
            found[cell.key] = content
            if suite.keeps(content):
                _keep(_file(folder, cell), content)
    except KeyboardInterrupt:
        if suite.whole(found):
            _conclude(suite, {**facts, "interrupted": True}, cells, found, folder)
        raise
    return _conclude(suite, facts, cells, found, folder)


def plan_sha256(plan: Mapping[str, Any], *, without: frozenset[str] = frozenset()) -> str:
    """The hash of a plan as JSON, except the fields in `without`.

    >>> plan_sha256({"seeds": 1, "steps": 2}) == plan_sha256({"steps": 2, "seeds": 1})
    True
    """
    kept = {name: value for name, value in plan.items() if name not in without}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _refuse_another(suite: Suite, folder: RunFolder, facts: Mapping[str, Any], bound: Mapping[str, Any]) -> None:
    before = read_run(folder)
    if not before:
        return
    was, now = before.get("plan", {}), facts["plan"]
    for name in now:
        if name not in suite.grows and was.get(name) != now[name]:
            allowed = f"{was.get(name)}, as {folder.path} was begun with"
            raise ConfigError(f"plan: {name}", now[name], allowed, "resume with the same arguments, or start anew")
    if before.get("plan_sha256") != facts["plan_sha256"]:
        raise ConfigError("out", str(folder.path), f"a folder of {suite.name} with the same plan", "start anew")
    then = before.get("bound_to", {})
    for name, value in bound.items():
        if name in then and then[name] != value:
            allowed = f"{then[name]}, as {folder.path} was begun with"
            raise ConfigError(name, value, allowed, "resume with what it began with, or start anew")


def _played(
    suite: Suite, cells: Sequence[Cell], found: dict[str, Any], folder: RunFolder, tell: Tell, processes: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield the missing cells with their results, as they end."""
    missing = [cell for cell in cells if cell.key not in found]
    if processes > 1:
        by_key = {cell.key: cell for cell in missing}
        given = {cell.key: (suite, cell, folder) for cell in missing}
        for done, (key, content) in enumerate(in_processes(_alone, given, processes), 1):
            tell(key, (len(cells) - len(missing) + done) / len(cells))
            yield by_key[key], content
        return
    with suite.means(folder) as means:
        for i, cell in enumerate(cells):
            if cell.key not in found:
                tell(cell.key, i / len(cells))
                yield cell, suite.run(cell, Context(folder, found, part_of(tell, i, len(cells)), means))


def _alone(suite: Suite, cell: Cell, folder: RunFolder) -> dict[str, Any]:
    with suite.means(folder) as means:
        return suite.run(cell, Context(folder, {}, untold, means))


def _conclude(
    suite: Suite, facts: Mapping[str, Any], cells: Sequence[Cell], found: Mapping[str, Any], folder: RunFolder
) -> dict[str, Any]:
    """Write result.json, table.md and, if the suite has a page, report.html."""
    whole = suite.whole({cell.key: found[cell.key] for cell in cells if cell.key in found})
    result = {**facts, "commit": commit(), "machine": machine(), **suite.conclude(whole)}
    folder.write_result(result)
    (folder.path / "table.md").write_text(suite.table(result), encoding="utf-8")
    page = suite.page(result)
    if page is not None:
        (folder.path / "report.html").write_text(page, encoding="utf-8")
    return result


def _file(folder: RunFolder, cell: Cell) -> Path:
    return folder.path / "cells" / f"{cell.key}.json"


def _keep(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    unfinished.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise StateError(f"{path} is damaged ({error}): remove it, and its cell is run again") from error
