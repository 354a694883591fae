"""Reads an events file, even a damaged one, or one that a run is still writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamix.errors import DynamixError, StateError
from dynamix.events.records import EVENTS_SCHEMA, parse_event
from dynamix.events.windows import window_of
from dynamix.window import PER_WORKER, Window

READ = ("compute", "compute_std", "wait", "communication", "data", "loss", "accuracy", "work")  # of each worker
_LEFT_OUT = tuple(f'"{name}":['.encode() for name in (*PER_WORKER, "allocation") if name not in READ)
LONGEST_LINE = 2**26  # bytes; a window of 16,384 workers takes less than one
_CHUNK = 2**20
_HEAD = 64  # bytes
_KINDS = {  # the fault of a line -> text with their number
    "broken": "{} no event (damaged, or of another program)",
    "future": "{} of a later version of dynamix than this one, which reads schema {schema}",
    "window": "{} without a window that can be used",
}


@dataclass(frozen=True)
class Recorded:
    """A line of an events file: its fields, and its window as arrays.

    Of the window's numbers of workers only those in `READ` are filled in, and `allocation` may be missing.
    """

    fields: dict[str, Any]
    window: Window


class EventFollower:
    """Reads an events file from where the last read stopped; nothing in the file can make it fail.

    Lines without a window are counted by their fault (`problems`), and the first one of each kind is named. A last
    line without an end is not read yet: a run is still writing it, or was killed meanwhile.

    >>> follower = EventFollower("/no/such/events.jsonl")
    >>> list(follower.more()), follower.problems()
    ([], ['/no/such/events.jsonl cannot be read: No such file or directory'])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.read = 0  # lines with a window
        self.unfinished = False  # the file ends within a line
        self.shrunk = False  # the file was replaced by another or a shorter one, and is read from its start
        self.thinned = False  # the file says that lines were removed from it
        self._head = b""  # its first bytes: they differ in another file, or after lines were removed
        self._rest, self._at, self._number = b"", 0, 0
        self._wrong: dict[str, tuple[int, int]] = {}  # kind -> count, and the first one's line number
        self._error = ""
        self._skipping = False  # within a line that is too long

    def more(self, most_bytes: int | None = None) -> Iterator[Recorded]:
        """The lines since the last call, oldest first; in a long file only about the next `most_bytes`."""
        self.shrunk, taken = False, 0
        try:
            with self.path.open("rb") as file:
                head = file.read(_HEAD)
                if os.fstat(file.fileno()).st_size < self._at or not head.startswith(self._head):
                    self._begin_anew()
                self._head = head
                file.seek(self._at)
                self._error = ""
                while (most_bytes is None or taken < most_bytes) and (chunk := file.read(_CHUNK)):
                    self._at, taken = self._at + len(chunk), taken + len(chunk)
                    yield from self._lines(chunk)
        except OSError as error:
            self._error = f"{self.path} cannot be read: {error.strerror or error}"
        self.unfinished = bool(self._rest) or self._skipping

    @property
    def behind_bytes(self) -> int:
        """Bytes of the file that were not read yet."""
        try:
            return max(self.path.stat().st_size - self._at, 0)
        except OSError:
            return 0

    def problems(self) -> list[str]:
        """The missing parts, as sentences; empty if everything was read."""
        said = [self._error] if self._error else []
        if self.thinned:
            said.append(f"{self.path.name} grew long, and a part of its older windows was left out")
        for kind, (count, first) in self._wrong.items():
            lines = "1 line is" if count == 1 else f"{count:,} lines are"
            if kind == "window":
                lines = lines.replace(" is", "").replace(" are", "")
            told = _KINDS[kind].format(lines, schema=EVENTS_SCHEMA)
            said.append(f"{self.path.name}: {told}; left out, the first is line {first:,}")
        if self.unfinished:
            said.append(f"{self.path.name} ends within a line: its run is still writing, or was killed")
        return said

    def _begin_anew(self) -> None:
        self.shrunk = True
        self._rest, self._at, self._number, self._wrong, self._skipping = b"", 0, 0, {}, False
        self.read = 0

    def _lines(self, chunk: bytes) -> Iterator[Recorded]:
        *whole, rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            self._number += 1
            if self._skipping:
                self._skipping = False
                self._count("broken")
            elif line.strip() and (found := self._event(line)) is not None:
                self.read += 1
                yield found
        self._skipping |= len(rest) > LONGEST_LINE
        self._rest = b"" if self._skipping else rest

    def _event(self, line: bytes) -> Recorded | None:
        try:
            try:
                event = _parsed(_shortened(line))
            except StateError:  # damaged, or in a form that dynamix does not write
                event = _parsed(line)
        except StateError as error:
            self._count(_kind(str(error)))
            return None
        try:
            self.thinned |= "thinned" in event
            return Recorded(event, window_of(event["window"], READ))
        except (DynamixError, ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError):
            self._count("window")
            return None

    def _count(self, kind: str) -> None:
        count, first = self._wrong.get(kind, (0, self._number))
        self._wrong[kind] = count + 1, first


def _parsed(line: bytes) -> dict[str, Any]:
    return parse_event(line.decode("utf-8", errors="replace"), "", unpack=False)


def _shortened(line: bytes) -> bytes:
    """The line without unused lists, because reading spends most of its time on parsing numbers.

    >>> _shortened(b'{"window":{"compute":[0.1,0.2],"rtt_s":[null,0.3],"steps":5}}')
    b'{"window":{"compute":[0.1,0.2],"steps":5}}'
    """
    for name in _LEFT_OUT:  # cannot match inside a string: there the quotes would be escaped
        at = line.find(name)
        end = line.find(b"]", at) + 1
        if at >= 0 and line[end : end + 1] == b",":
            line = line[:at] + line[end + 1 :]
    return line


def _kind(error: str) -> str:
    """The kind of fault in `_KINDS`, from the message of `parse_event`: in particular another schema number."""
    said = error.partition("event has schema ")[2].partition(",")[0]
    return "future" if said.isdigit() and int(said) > EVENTS_SCHEMA else "broken"
