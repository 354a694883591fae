"""events.jsonl: one line a window, written by rank 0 and readable while the run goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import IO, Any

from dynamix.errors import StateError
from dynamix.events.windows import PACKED_SCHEMA, unpacked, window_record
from dynamix.window import Window

SCHEMA = 1
EVENTS_VARIABLE = "DYNAMIX_EVENTS"  # names the events file of a job that names none; `dynamix emulate` sets it


class EventLog:
    """Appends one JSON object a line, flushed at once: a killed run loses at most the line it was writing.

    Lines carry `"schema": 1` (2 where a `Window` of many workers is packed) and the fields of docs/run-folder.md. NaN
    and infinity become null. An unfinished last line, left by a killed run, is cut off before the first new one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def write(self, **fields: Any) -> None:
        """Append one event. Values are a `Window` and what JSON knows; raises TypeError for others."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(_plain(fields), allow_nan=False, separators=(",", ":")) + "\n")
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


def event_log(path: str | os.PathLike[str] | None) -> EventLog | None:
    """Where a job's events go: `path`, else the file that DYNAMIX_EVENTS names, else nowhere."""
    chosen = path if path is not None else os.environ.get(EVENTS_VARIABLE)
    return EventLog(chosen) if chosen else None


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
    if found == PACKED_SCHEMA:
        try:
            return {**event, "window": unpacked(event["window"])}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"{place}: the packed window is damaged ({error})") from error
    if found != SCHEMA:
        raise StateError(f"{place}: event has schema {found!r}, this version reads {SCHEMA} and {PACKED_SCHEMA}")
    return dict(event)


def _cut_unfinished(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    schema, plain = SCHEMA, dict[str, Any]()
    for name, value in fields.items():
        if isinstance(value, Window):
            plain[name] = window_record(value)
            schema = PACKED_SCHEMA if "packed" in plain[name] else schema
        else:
            plain[name] = _finite(value)
    return {"schema": schema, **plain}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is int and set(map(type, value)) == {int}:  # sizes of many workers
            return value
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
