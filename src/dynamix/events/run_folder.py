"""The folder of every run: run.json, events.jsonl, result.json, report.html (docs/run-folder.md)."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix.events.records import SCHEMA

_PACKAGES = ("dynamix-train", "torch", "numpy", "mnist1d", "pyroute2")


class RunFolder:
    """One run's folder. Made when constructed; raises `ConfigError` if it exists and is not empty.

    path     None: `runs/<command>-<UTC time>` under the working directory
    resume   continue in the folder of an earlier run, which must exist
    """

    def __init__(self, command: str, path: str | os.PathLike[str] | None = None, *, resume: bool = False) -> None:
        self._made: list[Path] = []  # folders that it created, innermost first
        if resume:
            if path is None or not (Path(path) / "run.json").is_file():
                raise ConfigError("out", path and str(path), "the folder of the run to go on with", "name it by --out")
            self.path = Path(path)
            return
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        self.path = Path(path) if path is not None else Path("runs") / f"{command}-{stamp}"
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError("out", str(self.path), "a new or empty folder", "choose another, or remove this one")
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fix = f"choose a folder that can be written ({error.strerror})"
            raise ConfigError("out", str(self.path), "a folder that can be made", fix) from error

    @classmethod
    def at(cls, path: Path) -> RunFolder:
        """The existing folder `path`, unchanged."""
        folder = cls.__new__(cls)
        folder.path, folder._made = path, []
        return folder

    def __enter__(self) -> RunFolder:
        """As a context manager: a run that fails before it writes anything leaves no folder."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None or any(not found.is_dir() for found in self.path.rglob("*")):
            return
        with contextlib.suppress(OSError):
            for folder in [*sorted(self.path.rglob("*"), reverse=True), *self._made]:
                folder.rmdir()

    def write_run(self, **fields: Any) -> None:
        """Write run.json: what runs, with which versions, on which machine; `fields` are added."""
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        known = {"schema": SCHEMA, "commit": commit(), "started": started, "argv": sys.argv}
        self.write("run.json", as_json({**known, "versions": versions(), "machine": machine(), **fields}))

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json: exactly the output of --json."""
        self.write("result.json", as_json(result))

    def write(self, name: str, content: str) -> None:
        """Write one file as a whole: until it is complete, an earlier one stays."""
        target = self.path / name
        unfinished = target.with_suffix(".unfinished")
        try:
            unfinished.write_text(content, encoding="utf-8")
        except OSError:  # the disk is full
            unfinished.unlink(missing_ok=True)
            raise
        unfinished.replace(target)


def as_json(content: dict[str, Any]) -> str:
    """The text of a JSON file."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def row_folder(name: str) -> str:
    """Name of the folder of a comparison's row, inside the comparison's.

    >>> row_folder("static:256"), row_folder("my/policy.py:Mine")
    ('static-256', 'my-policy.py-Mine')
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "row"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results; missing ones are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, Any]:
    """The machine on which a timing was measured."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": model, "cores": cores, "system": f"{platform.system()} {platform.release()}"}


def commit() -> str | None:
    """The git commit of the source tree that this package runs from ("-dirty" if changed); None if installed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        # `git describe --dirty` writes the index. If a job is killed then, the lock stays and stops the next commit.
        asked = ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2", "--branch", "-uno"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    head, *others = done.stdout.splitlines()
    return head.split()[-1][:12] + ("-dirty" if any(line[0] != "#" for line in others) else "")
