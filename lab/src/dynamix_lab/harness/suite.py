"""One harness for every suite: a plan, its cells, resuming, progress, a result.

A suite says what its plan is, which cells the plan has, how one cell is run and what all of them together mean. The
harness does the rest: it refuses a folder that was begun with another plan, runs the cells that the folder does not
hold yet, keeps each as it ends, tells how far it is, and writes result.json, table.md and report.html.
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
"""How progress is told: what is going on, and the part that is done, 0 to 1."""


def untold(what: str, done: float) -> None:
    """A `Tell` that says nothing."""


def part_of(tell: Tell, index: int, parts: int) -> Tell:
    """A function that tells the progress of part `index` of `parts` equal ones."""
    return lambda what, done: tell(what, (index + done) / parts)


@dataclass(frozen=True, slots=True)
class Cell:
    """The smallest part of a suite that is kept.

    key    names its file in `cells/` of the run folder; unique in the plan
    what   what the suite needs to know to run it
    """

    key: str
    what: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """The services that a cell may use while it runs.

    folder   of the run; what a cell leaves there beside its result has names of its own
    found    results of the cells that have ended, by key
    tell     progress of this cell
    means    of `Suite.means`
    """

    folder: RunFolder
    found: Mapping[str, dict[str, Any]]
    tell: Tell
    means: Any = None


class Suite(ABC):
    """The interface of a suite for the harness. Everything a cell gives is plain JSON.

    name    of its command, and of the run folder
    plan    checked before anything runs; a folder is resumed with an equal one only
    grows   fields of the plan that a later call on the same folder may change, since they add or leave out whole cells
    """

    name: str
    plan: Any
    grows: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts before the first cell: `cluster`, `seeds`, `scenario_sha256` and what else the result names."""

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """The cells in the order in which they run. A cell may need the results of those before it."""

    @abstractmethod
    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        """Run one cell."""

    @abstractmethod
    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """The conclusions from all cells: `target`, `policies`, `ratios` and what else the result holds."""

    @abstractmethod
    def table(self, result: Mapping[str, Any]) -> str:
        """table.md."""

    def page(self, result: Mapping[str, Any]) -> str | None:
        """report.html, for suites that have one."""
        return None

    def bound_to(self) -> dict[str, Any]:
        """The facts that must be as they were when a folder is resumed: the commit, say, if times are compared."""
        return {}

    def begin(self, found: Mapping[str, Any]) -> None:  # noqa: B027 - few suites have something to do here
        """Called once before the first cell runs, with what the folder holds already."""

    def means(self, folder: RunFolder) -> contextlib.AbstractContextManager[Any]:
        """Means that cells share, such as processes: opened before the first, closed after the last."""
        return contextlib.nullcontext()

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of the finished cells that can be concluded from, none if they are too few."""
        return found

    def keeps(self, found: Mapping[str, Any]) -> bool:
        """Whether a cell's result is final. One that is not is run again when the folder is resumed."""
        return True


def run_suite(
    suite: Suite, folder: RunFolder, *, command: str | None = None, tell: Tell = untold, processes: int = 1
) -> dict[str, Any]:
    """Run what `folder` does not hold yet; returns result.json and writes it.

    command     the command line that asks for this, for the result
    processes   that play cells; more than one only for suites whose cells do not need each other

    Interrupted, it concludes from what has ended before `KeyboardInterrupt` goes on. Raises `ConfigError` for a bad
    plan and for a folder that was begun with another one.
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
    """The hash of a plan as JSON, but for the fields in `without`.

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
    """The missing cells with their results, as they end."""
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
