"""events.jsonl: one line a window, written by rank 0 and readable while the run goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import IO, Any

from dynamix.errors import StateError

SCHEMA = 1
EVENTS_VARIABLE = "DYNAMIX_EVENTS"  # names the events file of a job that names none; `dynamix emulate` sets it


class EventLog:
    """Appends one JSON object a line, flushed at once: a killed run loses at most the line it was writing.

    Lines carry `"schema": 1` and the fields of docs/run-folder.md. NaN and infinity become null. An unfinished last
    line, left by a killed run, is cut off before the first new one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def write(self, **fields: Any) -> None:
        """Append one event. Values are what JSON knows; raises TypeError for others."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_unfinished(self.path)
            self._file = self.path.open("ab")
        self._file.write(line_of(fields))
        self._file.flush()

    def close(self) -> None:
        """Close the file; safe to call twice. Writing again reopens it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def line_of(fields: dict[str, Any]) -> bytes:
    """One event as a line of the file. Raises TypeError for values that JSON does not know."""
    return (json.dumps(_finite({"schema": SCHEMA, **fields}), allow_nan=False) + "\n").encode()


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a file, oldest first. An unfinished last line is left out: its writer was killed.

    Raises `StateError` naming the line when anything else is broken or of another schema.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise StateError(f"cannot read events file {os.fspath(path)}: {error.strerror}") from error
    lines = text.split("\n")[:-1]  # what follows the last end of a line is unfinished, or empty
    return [_parse(line, f"{os.fspath(path)}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except json.JSONDecodeError as error:
        why = f"not a line of JSON ({error.msg}); the file was changed after it was written"
        raise StateError(f"{place}: {why}") from error
    found = event.get("schema") if isinstance(event, dict) else None
    if found != SCHEMA:
        raise StateError(f"{place}: event has schema {found!r}, this version reads {SCHEMA}")
    return dict(event)


def cut_unfinished(path: Path) -> None:
    """Cut off an unfinished last line, left by a killed run."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_file():
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
