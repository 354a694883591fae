"""events.jsonl: one line a window, written by rank 0 and readable while the run goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import IO, Any

from dynamix.errors import StateError
from dynamix.events.windows import unpacked, window_record
from dynamix.window import Window

SCHEMA = 1  # of result.json and what else is written as JSON
EVENTS_SCHEMA = 2  # sizes are samples per round; 1 counted them per micro-batch
EVENTS_VARIABLE = "DYNAMIX_EVENTS"  # names the events file of a job that names none; `dynamix emulate` sets it


class EventLog:
    """Appends one JSON object a line, flushed at once: a killed run loses at most the line it was writing.

    Lines carry `"schema": 2` and the fields of docs/run-folder.md. NaN and infinity become null. An unfinished last
    line, left by a killed run, is cut off before the first new one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def write(self, **fields: Any) -> None:
        """Append one event. Values are a `Window` and what JSON knows; raises TypeError for others."""
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
    event = {"schema": EVENTS_SCHEMA, **_plain(fields)}
    return (json.dumps(event, allow_nan=False, separators=(",", ":")) + "\n").encode()


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a file, oldest first. An unfinished last line is left out: its writer was killed.

    Raises `StateError` naming the line when anything else is broken or of another schema, such as that of version 0.1.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise StateError(f"cannot read events file {os.fspath(path)}: {error.strerror}") from error
    lines = text.split("\n")[:-1]  # what follows the last end of a line is unfinished, or empty
    return [parse_event(line, f"{os.fspath(path)}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def parse_event(line: str, place: str, *, unpack: bool = True) -> dict[str, Any]:
    """The event in one line of a file. Raises `StateError`, which begins with `place`, where it is none.

    unpack   False: leave a packed window as it is, for `dynamix.events.windows.window_of`
    """
    try:
        event = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: JSON's own, and whole numbers of thousands of digits
        why = f"not a line of JSON ({error}); the file was changed after it was written"
        raise StateError(f"{place}: {why}") from error
    found = event.get("schema") if isinstance(event, dict) else None
    if type(found) is not int or found != EVENTS_SCHEMA:
        of_0_1 = " (version 0.1)" if found == 1 else ""
        raise StateError(f"{place}: event has schema {found!r}{of_0_1}, this version reads {EVENTS_SCHEMA}")
    try:
        if unpack and isinstance(event.get("window"), dict):
            event["window"] = unpacked(event["window"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"{place}: the packed window is damaged ({error})") from error
    return dict(event)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def cut_unfinished(path: Path) -> None:
    """Cut off an unfinished last line, left by a killed run."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_file():
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: window_record(v) if isinstance(v, Window) else _finite(v) for k, v in fields.items()}


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
