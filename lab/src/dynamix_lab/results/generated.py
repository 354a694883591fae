"""Tables in README and docs that are generated from results/.

A table stands between two comments and is never edited:

    <!-- table: results/demo-2026-11-23 -->
    ...
    <!-- end -->

`results/demo-*` is the newest result of that name. A third word chooses a part of a result with several tables, such
as `<!-- table: results/compression-* goals -->`. The part `short` compares times with two rows, for the README.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix_lab.results.record import load
from dynamix_lab.results.views import SHORT, markdown_of

_BLOCK = re.compile(r"(<!-- table: (\S+)(?: (\S+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NONE_YET = "No result of this name is recorded yet.\n"


def pages(root: Path) -> list[Path]:
    """README.md and every Markdown file of docs/. Raises `ConfigError` where `root` is not the repository."""
    found = [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.is_file()]
    if not found:
        raise ConfigError("root", str(root), "the root of the repository", "call it there")
    return found


def changes(root: Path, files: Sequence[Path] | None = None) -> Iterator[tuple[Path, str]]:
    """The pages whose tables are not those of results/, each with the text that it should have."""
    for path in files or pages(root):
        text = path.read_text(encoding="utf-8")
        made = generated(text, root)
        if made != text:
            yield path, made


def generated(text: str, root: Path) -> str:
    """A page with its tables made anew. Raises `ConfigError` for a comment that is not closed."""
    if text.count("<!-- table:") != len(_BLOCK.findall(text)):
        raise ConfigError(
            "table", "a comment without its end", "<!-- table: results/NAME -->, <!-- end -->", "close it"
        )

    def block(found: re.Match[str]) -> str:
        begin, path, view, _, end = found.groups()
        result = load(path, root)
        made = (
            NONE_YET
            if result is None
            else f"{markdown_of(result, view or '')}\n{source(result, short=view == SHORT)}\n"
        )
        return f"{begin}\n{made}\n{end}"

    return _BLOCK.sub(block, text)


def source(result: Mapping[str, Any], *, short: bool = False) -> str:
    """The line under a table: what made it, from which commit, on what; `short` leaves commit and machine to others."""
    if short:
        return f"`{result['command'].split(' --')[0]}`, {len(result['seeds'])} seeds; {result['cluster']}."
    machine = result["machine"]
    where = f"{result['cluster']}, {machine['cores']} cores ({machine['cpu']})"
    seeds = f", seeds {json.dumps(result['seeds'])[1:-1]}" if result.get("seeds") else ""
    return f"`{result['command']}`, commit {str(result['commit'])[:12]}{seeds}; {where}."
