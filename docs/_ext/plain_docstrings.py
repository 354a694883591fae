"""Docstrings of this project as reStructuredText.

They are written to be read in an editor: a list of names is two columns, an example is indented. `as_rst` gives them
the marks that Sphinx needs, and leaves the words alone.
"""

from __future__ import annotations

import re
from typing import Any

COLUMNS = re.compile(r"^(?P<names>[\w.*]+(?:, [\w.*]+)*) {2,}(?P<text>\S.*)$")
BULLET = re.compile(r"^- ")


def escaped(text: str) -> str:
    """`text` without marks outside of backticks.

    >>> escaped("|g_i|^2 of `x*`, and *y")
    '\\\\|g_i\\\\|^2 of `x*`, and \\\\*y'
    """
    parts = text.split("`")
    outside = [re.sub(r"([\\*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    parts[::2] = outside
    return "`".join(parts)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring, cleaned of their common indentation, as reStructuredText.

    >>> as_rst(["What it does.", "", "size   of a worker", "       and round"])
    ['What it does.', '', '**size**', '    of a worker', '    and round', '']
    >>> as_rst(["An example:", "", "    run(1)", "", "The end."])
    ['An example:', '', '.. code-block:: python', '', '    run(1)', '', 'The end.']
    """
    made: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        found = COLUMNS.match(line.strip())
        if line.startswith(">>> "):
            while at < len(lines) and lines[at].strip():
                made.append(lines[at])
                at += 1
        elif found and _indent(line) <= 3:
            at = _names(lines, at, made)
        elif _indent(line) >= 4 and (at == 0 or not lines[at - 1].strip()):
            at = _example(lines, at, made)
        elif BULLET.match(line):
            if made and made[-1] and not made[-1].startswith(("- ", "  ")):
                made.append("")
            made.append(escaped(line))
            at += 1
            while at < len(lines) and lines[at].startswith("  "):
                made.append(f"  {escaped(lines[at].strip())}")
                at += 1
            if at < len(lines) and lines[at].strip() and not BULLET.match(lines[at]):
                made.append("")
        else:
            made.append(escaped(line.strip()))
            at += 1
    return made


def _names(lines: list[str], at: int, made: list[str]) -> int:
    """A list of names in two columns; returns the line after it."""
    if made and made[-1]:
        made.append("")
    depth = _indent(lines[at])
    while at < len(lines):
        found = COLUMNS.match(lines[at].strip()) if _indent(lines[at]) == depth else None
        if found is None:
            break
        made += [
            ", ".join(f"**{escaped(name)}**" for name in found["names"].split(", ")),
            f"    {escaped(found['text'])}",
        ]
        at += 1
        while at < len(lines) and lines[at].strip() and _indent(lines[at]) > depth:
            if _indent(lines[at]) == depth + 2 and COLUMNS.match(lines[at].strip()):
                break
            made.append(f"    {escaped(lines[at].strip())}")
            at += 1
        made.append("")
    return at


def _example(lines: list[str], at: int, made: list[str]) -> int:
    """An indented block; returns the line after it."""
    code = all(mark not in lines[at] for mark in ("$ ", "torchrun "))
    made += [f".. code-block:: {'python' if code else 'text'}", ""]
    while at < len(lines) and (not lines[at].strip() or _indent(lines[at]) >= 4):
        made.append(lines[at])
        at += 1
    while made and not made[-1].strip():
        made.pop()
    made.append("")
    return at


def linked(line: str) -> str:
    """`line` with links to the pages that it names.

    >>> linked("how (docs/rounds.md)")
    'how (:doc:`/rounds`)'
    """
    return re.sub(r"\bdocs/([\w/-]+)\.md", r":doc:`/\1`", line)


def _process(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [linked(line) for line in as_rst([line.rstrip() for line in lines])]


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
