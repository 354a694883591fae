"""Generates from results/: the page of each, `results/NAME-DATE/table.md`, and tables in README and docs.

A table is enclosed by two comments and is never edited:

    <!-- table: results/demo-2026-11-23 -->
    ...
    <!-- end -->

`results/demo-*` is the newest result of that name. A third word selects the part below one heading of its page, as in
`<!-- table: results/compression-* goals -->`. Names of columns select only these columns:
`<!-- table: results/compression-* goals: goal | reached -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix_lab.results.record import newest, result_of
from dynamix_lab.results.tables import markdown_of

_BLOCK = re.compile(r"(<!-- table: ([^\s:]+)(?: ([^\s:]+))?(?:: (.+?))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NONE_YET = "No result of this name is recorded yet.\n"


def pages(root: Path) -> list[Path]:
    """README.md and every Markdown file of docs/. Raises `ConfigError` if `root` is not the repository."""
    found = [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.is_file()]
    if not found:
        raise ConfigError("root", str(root), "the root of the repository", "call it there")
    return found


def changes(root: Path) -> Iterator[tuple[Path, str]]:
    """The pages that differ from results/, each with its correct text."""
    made = {path: generated(path, root) for path in pages(root)}
    for result in sorted((root / "results").glob("*/result.json")):
        made[result.parent / "table.md"] = tables_of(result.parent)
    for path, text in made.items():
        if text != (path.read_text(encoding="utf-8") if path.exists() else ""):
            yield path, text


def tables_of(folder: Path) -> str:
    """The page of a result. If its suite was removed, the existing page; "" if there is none."""
    result, path = result_of(folder), folder / "table.md"
    if made := markdown_of(result):
        return f"# {folder.name}\n\n{source(result)}\n\n{made}"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def generated(page: Path, root: Path) -> str:
    """A page with its tables regenerated. Raises `ConfigError` for a comment that is not closed."""
    text = page.read_text(encoding="utf-8")
    if text.count("<!-- table:") != len(_BLOCK.findall(text)):
        raise ConfigError(
            "table", "a comment without its end", "<!-- table: results/NAME -->, <!-- end -->", "close it"
        )

    def block(found: re.Match[str]) -> str:
        begin, path, heading, columns, _, end = found.groups()
        folder = newest(path, root)
        made = NONE_YET
        if folder is not None:
            made = part_of(tables_of(folder), heading or "", columns.split(" | ") if columns else [])
            made = f"{made}\n{_short_source(folder, page)}\n"
        return f"{begin}\n{made}\n{end}"

    return _BLOCK.sub(block, text)


def part_of(text: str, heading: str, columns: Sequence[str]) -> str:
    """The part of a result's page below a heading, or all of it; only these columns of its table, if any are named.

    Raises `ConfigError` for a missing heading or column.
    """
    below = re.sub(r"^`.+`, commit .*\n", "", text, flags=re.MULTILINE)  # without the line about command and commit
    before, *split = re.split(r"^#+ (.*)\n", below, flags=re.MULTILINE)
    bodies = {_anchor(title): body for title, body in zip(split[::2], split[1::2], strict=True)}
    if heading and heading not in bodies:
        raise ConfigError("table", heading, ", ".join(bodies), "name a part of this result")
    body = bodies[heading] if heading else before + "".join(bodies.values())
    if not columns:
        return body.strip() + "\n"
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.split("\n") if line.startswith("|")]
    head = [cell.strip() for cell in lines[0]]
    if missing := [name for name in columns if name not in head]:
        raise ConfigError("column", missing[0], " | ".join(head), "name a column of this table")
    chosen = [head.index(name) for name in columns]
    return "".join(f"|{'|'.join(line[at] for at in chosen)}|\n" for line in lines)


def _anchor(heading: str) -> str:
    """
    >>> _anchor("Losses, bit by bit")
    'losses-bit-by-bit'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in heading.lower()).split())


def source(result: Mapping[str, Any]) -> str:
    """The source of a result: the command, the commit, the machine."""
    machine = result["machine"]
    where = f"{result['cluster']}, {machine['cores']} cores ({machine['cpu']})"
    seeds = f", seeds {json.dumps(result['seeds'])[1:-1]}" if result.get("seeds") else ""
    return f"`{result['command']}`, commit {str(result['commit'])[:12]}{seeds}; {where}."


def _short_source(folder: Path, page: Path) -> str:
    """The line under a table in a page: the command, the number of seeds, and a link to the full record."""
    result = result_of(folder)
    seeds = f", {len(result['seeds'])} seeds" if len(result.get("seeds", [])) > 1 else ""
    link = relpath(folder / "table.md", page.parent)
    return f"`{result['command'].split(' --')[0]}`{seeds}; {result['cluster']}. [All of it]({link})."
