"""Writes a rank's observations: `rankN.steps`, rows of 32-bit floats, and `rankN.json`, their description."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import StateError
from dynamix.observe.recorder import FIELDS
from dynamix.window import Floats

SCHEMA = 1
WAITING = 100  # writes that may wait for a slow file system, about one in two seconds; beyond that, writing stops


class RankFile:
    """A rank's two files, written by a thread, so that a file system that hangs delays no step.

    If a file cannot be written, writing stops with one message: observing never ends a job.
    """

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self.folder, self.rank = folder, rank
        self.facts = {"schema": SCHEMA, "rank": rank, "fields": FIELDS, "pid": os.getpid(), **facts}
        self.failed = False
        self._waiting: queue.Queue[tuple[array[float], dict[str, Any]] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._serve, name="dynamix-observe", daemon=True)
        self._thread.start()

    def write(self, rows: array[float], **about: Any) -> None:
        """Append rows and update the facts about the rank, soon. Do not change either afterwards."""
        try:
            self._waiting.put_nowait((rows, about))
        except queue.Full:
            self._give_up("the file system does not answer")

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, within `timeout_s`. Safe to call twice."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up("the file system does not answer")

    def _serve(self) -> None:
        file: Any = None
        while (item := self._waiting.get()) is not None:
            if self.failed:
                continue
            rows, about = item
            try:
                if file is None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    file = (self.folder / f"rank{self.rank}.steps").open("wb")
                file.write(np.asarray(rows, "<f4").tobytes())
                file.flush()
                self.facts.update(about)
                unfinished = self.folder / f"rank{self.rank}.unfinished"
                unfinished.write_text(json.dumps({**self.facts, "written": time.time()}), encoding="utf-8")
                unfinished.replace(self.folder / f"rank{self.rank}.json")
            except Exception as error:  # training goes on, whatever the error
                self._give_up(str(error))
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _give_up(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            print(f"dynamix observe: rank {self.rank} can no longer write what it sees ({why})", file=sys.stderr)


@dataclass(frozen=True)
class RankSteps:
    """The current content of one rank's files.

    facts   of `rankN.json`: `rank`, `world`, `ended`, `links` and more
    rows    (steps, fields) by `FIELDS`, seconds; NaN if not measured
    """

    facts: dict[str, Any]
    rows: Floats


def read_rank(folder: Path, rank: int) -> RankSteps:
    """Read a rank's files, even while it writes: an unfinished row is left out. Raises `StateError` for other files."""
    try:
        facts = dict(json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")))
        raw = (folder / f"rank{rank}.steps").read_bytes()
    except (OSError, ValueError, TypeError) as error:
        raise StateError(f"cannot read what rank {rank} wrote in {folder}: {error}") from error
    if facts.get("schema") != SCHEMA or facts.get("fields") != list(FIELDS):
        raise StateError(f"rank{rank}.json in {folder} has schema {facts.get('schema')!r}: this version reads {SCHEMA}")
    width = len(FIELDS)
    whole = np.frombuffer(raw[: len(raw) // (4 * width) * 4 * width], dtype="<f4").astype(np.float64)
    return RankSteps(facts, whole.reshape(-1, width))


def ranks_in(folder: Path) -> list[int]:
    """The ranks with a file in `folder`."""
    names = (path.stem[4:] for path in folder.glob("rank*.json"))
    return sorted(int(name) for name in names if name.isdigit())
