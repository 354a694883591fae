"""`dynamix bench decisions --against REV`: whether every policy still decides what it decided under REV.

The corpus is recorded in a git worktree of REV and replayed from the source tree at hand, on the same machine, each in
a process of its own. The file of recorded decisions stays in the run folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dynamix
from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.run_folder import commit
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Table

LABORATORY = Path(__file__).parents[3]  # lab/src
SOURCE = Path(dynamix.__file__).parents[1]
PROGRAM = "dynamix_lab.suites.decisions.replay"
LIMITS = "0.1 % of the windows may differ, each by one quantum: processors round exp differently"


@dataclass(frozen=True, slots=True)
class DecisionsPlan:
    """against: what git calls a revision of this repository."""

    against: str

    def check(self) -> None:
        """Raises `ConfigError` where there is no such revision, or no repository."""
        self.revision()

    def revision(self) -> str:
        """The commit that `against` names."""
        root = repository()
        asked = ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", f"{self.against}^{{commit}}"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError("against", self.against, "a revision of this repository", "name a commit, tag or branch")
        return done.stdout.strip()


def repository() -> Path:
    """The root of the source tree. Raises `ConfigError` for an installed laboratory."""
    root = LABORATORY.parents[1]
    if not (root / ".git").exists():
        raise ConfigError("against", "no repository", "a clone of the repository", "install it with pip install -e")
    return root


@dataclass(frozen=True)
class DecisionsSuite(Suite):
    """Two cells: what the other revision decides, and how this one differs."""

    plan: DecisionsPlan
    name: str = "decisions"

    def facts(self) -> dict[str, Any]:
        about = {"cluster": "one process, one thread", "seeds": [17], "limits": LIMITS}
        return {**about, "against": self.plan.revision()}

    def bound_to(self) -> dict[str, Any]:
        return {"commit": commit()}

    def cells(self) -> list[Cell]:
        return [Cell("recorded"), Cell("replayed")]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        file = context.folder.path / "decisions.npz"
        if cell.key == "replayed":
            return asked(PROGRAM, ["replay", str(file.resolve())], SOURCE, context.folder.path / "replay.err")
        with source_of(self.plan.revision()) as source:
            return asked(PROGRAM, ["record", str(file.resolve())], source, context.folder.path / "record.err")

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        return found if "replayed" in found else {}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        replayed = {name: value for name, value in cells["replayed"].items() if name not in ("schema", "policies")}
        covered = {name: value for name, value in cells["recorded"].items() if name != "policies"}
        return {**replayed, "recorded": covered, "by_policy": cells["replayed"]["policies"]}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()


@contextlib.contextmanager
def source_of(revision: str) -> Iterator[Path]:
    """The folder to put on the path for another revision's package: of a git worktree, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dynamix-revision-") as scratch:
        tree = Path(scratch) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), revision)
        try:
            yield tree / "src"
        finally:
            _git("worktree", "remove", "--force", str(tree))


def asked(program: str, arguments: Sequence[str], source: Path, errors: Path) -> dict[str, Any]:
    """The JSON that `program` prints with `source` first on the path; what else it says goes to the file `errors`."""
    path = os.pathsep.join([str(source), str(LABORATORY)])
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    errors.write_text(done.stderr, encoding="utf-8")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise WorkerLostError(f"{program} ended with {done.returncode}: {last[0]} (all of it in {errors})")
    return dict(json.loads(done.stdout))


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(repository()), *arguments], check=True, capture_output=True, text=True)


def table(result: Mapping[str, Any]) -> Table:
    """A row a policy, and one for all."""
    keys = ("windows", "sizes", "different", "within_one_quantum", "worst", "reasons_different")
    rows = [
        [name, *[f"{part[key]:,}" for key in keys]] for name, part in [*result["by_policy"].items(), ("all", result)]
    ]
    head = ["policy", "windows", "sizes", "windows that differ", "by one quantum", "largest difference, samples"]
    return Table([*head, "windows with another reason"], rows)
