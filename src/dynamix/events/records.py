"""events.jsonl: one line a window, written by rank 0 and readable during the run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dynamix.errors import ConfigError, StateError
from dynamix.events.windows import unpacked, window_record
from dynamix.window import Window

SCHEMA = 1  # of result.json and other JSON files
EVENTS_SCHEMA = 2  # sizes are samples per round; 1 counted them per micro-batch
MOST_BYTES = 2**26  # a controller's events file is thinned above this size
EVENTS_VARIABLE = "DYNAMIX_EVENTS"  # names a job's events file in place of `events=`; `dynamix emulate` sets it

# What a line says itself, so that no policy's report may.
_OWN = {"schema", "window_index", "window", "decision", "allocation", "from_step", "piece", "interval", "noise"}
_OWN |= {"signal", "samples_seen", "began_at", "time_s", "short", "dropped", "thinned", "policy", "seed", "attempt"}


class EventLog:
    """Appends one JSON object a line, flushed at once: a killed run loses at most the line being written.

    Lines carry `"schema": 2` and the fields of docs/run-folder.md. NaN and infinity become null. An unfinished last
    line, left by a killed run, is cut off before the first new one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def write(self, /, **fields: Any) -> None:
        """Append one event, of values that `plain` takes; else TypeError. As `require_events`."""
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
    """One event as a line of the file. Raises TypeError for values that JSON does not support."""
    event = {"schema": EVENTS_SCHEMA, **plain(fields)}
    return (json.dumps(event, allow_nan=False, separators=(",", ":")) + "\n").encode()


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a file, oldest first. An unfinished last line is left out: its writer was killed.

    Raises `StateError` naming the line if anything else is damaged or of another schema.
    """
    return list(each_event(path))


def each_event(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """`read_events`, one at a time, because files may be larger than memory."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and line.endswith(b"\n"):  # without that end it is unfinished
                    yield parse_event(line.decode("utf-8", errors="replace"), f"{os.fspath(path)}:{number}")
    except OSError as error:
        raise StateError(f"cannot read events file {os.fspath(path)}: {error.strerror}") from error


def parse_event(line: str, place: str, *, unpack: bool = True) -> dict[str, Any]:
    """The event in one line of a file. Raises `StateError`, which begins with `place`, if it is no event.

    unpack   False: leave a packed window as it is, for `dynamix.events.windows.window_of`
    """
    try:
        event = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: JSON's own, and whole numbers of thousands of digits
        why = f"not a line of JSON ({error}); the file was changed after it was written"
        raise StateError(f"{place}: {why}") from error
    found = event.get("schema") if isinstance(event, dict) else None
    if type(found) is not int or found != EVENTS_SCHEMA:
        raise StateError(f"{place}: event has schema {found!r}, this version reads {EVENTS_SCHEMA}")
    try:
        if unpack and isinstance(event.get("window"), dict):
            event["window"] = unpacked(event["window"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"{place}: the packed window is damaged ({error})") from error
    return dict(event)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def cut_unfinished(path: Path) -> None:
    """Cut off an unfinished last line, left by a killed run. As `require_events`."""
    require_events(path)
    with contextlib.suppress(FileNotFoundError):
        if path.is_file():
            with path.open("rb+") as file:
                begin, found = file.seek(0, os.SEEK_END), -1
                while found < 0 < begin:
                    begin = file.seek(max(begin - 2**16, 0))
                    found = file.read(2**16).rfind(b"\n")
                file.truncate(begin + found + 1)


def thin(path: Path, most_bytes: int) -> None:
    """Remove lines from a file that is longer than `most_bytes`, so that at most about three quarters of that remain.

    The newest half of `most_bytes` is kept, and so are lines that begin a run. Of the others every second one is
    removed; more if the file is longer still. The first line counts in `thinned` how often this was done.
    """
    path = path.resolve()  # so that a link stays a link
    shorter, begins = path.with_name(f"{path.name}.thinned"), line_of({"window_index": 0}).replace(b"}\n", b",")
    older, at = path.stat().st_size - most_bytes // 2, 0
    every = math.ceil(older / (most_bytes // 4))
    try:
        with path.open("rb") as file, shorter.open("wb") as kept:
            for number, line in enumerate(file):
                if number == 0:
                    first = parse_event(line.decode(errors="replace"), f"{path}:1", unpack=False)
                    kept.write(line_of({"thinned": first.pop("thinned", 0) + 1, **first}))
                elif at >= older or number % every == 0 or line.startswith(begins):
                    kept.write(line)
                at += len(line)
        shutil.copymode(path, shorter)
        shorter.replace(path)
    finally:
        shorter.unlink(missing_ok=True)


def require_events(path: Path, name: str = "events") -> None:
    """Raise `ConfigError` if `path` is a folder, or a file that does not begin with events of this version.

    name   of the argument or environment variable that names the file
    """
    if path.is_dir():
        raise ConfigError(name, str(path), "a file", f"name one in this folder, such as {path / 'events.jsonl'}")
    line, begins = b"", line_of({}).replace(b"}\n", b",")
    if path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:  # the writer will get the error
            line = file.readline(2**24)
    ours = begins.startswith(line[: len(begins)])  # empty, or an unfinished first line
    if line.endswith(b"\n"):
        with contextlib.suppress(StateError):
            ours = bool(parse_event(line.decode("utf-8", errors="replace"), "", unpack=False))
    if not ours:
        fix = "name another one: this does not begin with an event of this version, and is left as it is"
        raise ConfigError(name, str(path), "a new file, or the events file of an earlier run", fix)


def reported(report: dict[str, Any]) -> dict[str, Any]:
    """A copy of a policy's `report` for a line, without what the line says itself; a warning names that."""
    if taken := sorted(_OWN & report.keys()):
        left = "dynamix writes that itself, so the events file leaves it out. Use another name"
        warnings.warn(f"the policy's report() has {', '.join(map(repr, taken))}: {left}", RuntimeWarning, stacklevel=2)
    return {str(name): plain(value) for name, value in report.items() if name not in _OWN}


def plain(value: Any) -> Any:
    """`value` for JSON: a window as its record, arrays and tensors as lists, NaN and infinity as None."""
    if isinstance(value, Window):
        return window_record(value)
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is int and set(map(type, value)) == {int}:  # sizes of many workers
            return value
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
