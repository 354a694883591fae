"""Recorded slowdowns as CSV: a time and, for every host, the fraction of its full speed from then on.

    # any line that begins with a hash is a comment
    time_s,host0,host1
    0,1.0,0.8
    12.5,1.0,0.35

Values hold until the next line. No gap is filled: a missing value is refused, with its line.
"""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamix.errors import ScenarioError

LEAST_FACTOR = 0.05
MAX_ROWS = 10_000

Rows = tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]


def parse_trace(text: str, name: str) -> Rows:
    """(times, factors by row and host) of a CSV text; `name` is its name in errors.

    Raises `ScenarioError` naming line and column for a missing cell, an empty line inside, text, NaN, infinity,
    negative or unsorted times, a first time other than 0, and factors outside 0.05 to 1.

    >>> parse_trace("time_s,a,b\\n0,1,0.5\\n2,1,1\\n", "mine.csv")
    ((0.0, 2.0), ((1.0, 0.5), (1.0, 1.0)))
    >>> parse_trace("time_s,a,b\\n0,1,0.5\\n2,1,\\n", "mine.csv")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dynamix.errors.ScenarioError: mine.csv line 3, b='' is not possible: allowed is 0.05 to 1; fill the gap, ...
    """
    lines = [(n, line.strip()) for n, line in enumerate(text.rstrip().splitlines(), 1)]
    lines = [(n, line) for n, line in lines if not line.startswith("#")]
    if not lines:
        raise ScenarioError(name, "", "a line time_s,host0,... and a line per change", "write the trace")
    head = [cell.strip() for cell in _split(lines[0][1], f"{name} line {lines[0][0]}")]
    if len(head) < 2 or head[0] != "time_s":
        place, fix = f"{name} line {lines[0][0]}", "begin the file with time_s,host0,host1,..."
        raise ScenarioError(place, lines[0][1], "time_s and a name per host", fix)
    rows = [_numbers(line, head, f"{name} line {n}") for n, line in lines[1:]]
    times, factors = tuple(row[0] for row in rows), tuple(tuple(row[1:]) for row in rows)
    check_rows(times, factors, lambda i: f"{name} line {lines[1 + i][0]}" if i < len(rows) else name, head[1:])
    return times, factors


def read_trace(path: Path) -> Rows:
    """`parse_trace` of a file. Raises `ScenarioError` also if it cannot be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError("trace.file", str(path), "a readable CSV file", f"check the name ({reason})") from None
    return parse_trace(text, path.name)


def check_rows(
    times: Sequence[float],
    factors: Sequence[Sequence[float]],
    place: Callable[[int], str] = lambda i: f"trace row {i}",
    names: Sequence[str] | None = None,
) -> None:
    """Raise `ScenarioError` naming `place(row)` unless times begin at 0 and rise and factors are 0.05 to 1."""
    if not 1 <= len(times) <= MAX_ROWS or len(times) != len(factors):
        counts = f"{len(times)} times, {len(factors)} rows of factors"
        raise ScenarioError(place(len(times)), counts, f"as many of both, 1 to {MAX_ROWS}", "complete the trace")
    before = -math.inf
    for i, (time_s, row) in enumerate(zip(times, factors, strict=True)):
        at = f"{place(i)}, time_s"
        if not math.isfinite(time_s) or time_s < 0:
            raise ScenarioError(at, time_s, "a finite number, 0 or more", "correct the time")
        if i == 0 and time_s != 0:
            raise ScenarioError(at, time_s, "0 in the first row", "say what holds from the start")
        if time_s <= before:
            raise ScenarioError(at, time_s, f"more than {before:g}, the time before", "sort the rows by time")
        before = time_s
        if len(row) != len(factors[0]):
            raise ScenarioError(place(i), len(row), f"{len(factors[0])} factors, as in the first row", "fill the gap")
        for column, factor in zip(names or [f"factor {host}" for host in range(len(row))], row, strict=True):
            if not LEAST_FACTOR <= factor <= 1:
                fix = "divide by the full speed, which is 1"
                raise ScenarioError(f"{place(i)}, {column}", factor, f"{LEAST_FACTOR} to 1", fix)


def _split(line: str, place: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        raise ScenarioError(place, line[:80], "cells between commas", f"correct the line ({error})") from None


def _numbers(line: str, head: Sequence[str], place: str) -> list[float]:
    if not line:
        raise ScenarioError(place, "", f"{len(head)} numbers", "remove the empty line, or fill the gap")
    cells = [cell.strip() for cell in _split(line, place)]
    if len(cells) != len(head):
        raise ScenarioError(place, line, f"{len(head)} numbers, as many as the first line has names", "fill the gap")
    return [_number(cell, f"{place}, {name}", name) for cell, name in zip(cells, head, strict=True)]


def _number(cell: str, place: str, name: str) -> float:
    try:
        return float(cell)
    except ValueError:
        allowed = "a time in seconds" if name == "time_s" else f"{LEAST_FACTOR} to 1"
        fix = "correct the cell" if cell else "fill the gap, values are never guessed"
        raise ScenarioError(place, cell, allowed, fix) from None
