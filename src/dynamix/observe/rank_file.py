"""What a rank writes while it is observed: `rankN.steps`, rows of 32-bit floats, and `rankN.json`, what they are."""

from __future__ import annotations

import contextlib
import json
import os
import sys
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


class RankFile:
    """A rank's two files. What cannot be written is said once and given up: observing never ends a job."""

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self.folder, self.rank = folder, rank
        self.facts = {"schema": SCHEMA, "rank": rank, "fields": FIELDS, "pid": os.getpid(), **facts}
        self.failed = False
        self._file: Any = None

    def write(self, rows: array[float], **about: Any) -> None:
        """Append rows and say again what is known of the rank."""
        if self.failed:
            return
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = (self.folder / f"rank{self.rank}.steps").open("wb")
            self._file.write(rows.tobytes() if sys.byteorder == "little" else _swapped(rows))
            self._file.flush()
            self.facts.update(about)
            unfinished = self.folder / f"rank{self.rank}.unfinished"
            unfinished.write_text(json.dumps({**self.facts, "written": time.time()}), encoding="utf-8")
            unfinished.replace(self.folder / f"rank{self.rank}.json")
        except OSError as error:
            self.failed = True
            print(f"dynamix observe: rank {self.rank} can no longer write what it sees ({error})", file=sys.stderr)

    def close(self) -> None:
        """Safe to call twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def _swapped(rows: array[float]) -> bytes:
    turned = array("f", rows)
    turned.byteswap()
    return turned.tobytes()


@dataclass(frozen=True)
class RankSteps:
    """One rank's files as they are now.

    facts   of `rankN.json`: `rank`, `world`, `ended`, `links` and more
    rows    (steps, fields) by `FIELDS`, seconds; NaN where not measured
    """

    facts: dict[str, Any]
    rows: Floats


def read_rank(folder: Path, rank: int) -> RankSteps:
    """Also while it is written: an unfinished row is left out. Raises `StateError` for other files."""
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
    """Which ranks have written there."""
    names = (path.stem[4:] for path in folder.glob("rank*.json"))
    return sorted(int(name) for name in names if name.isdigit())
