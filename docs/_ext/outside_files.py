"""Links of pages to files beside docs/: Markdown becomes a page, and any other file is copied beside the pages.

A page says `[example](../examples/train.py)`, which is right in the repository, too. On the site the link leads to a
copy of the file. A link to a folder leads to the page that lists what is in it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()((?:\.\./)+)([^)#\s]+)((?:#[^)\s]*)?\))")
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "examples/": "examples.md"}
INCLUDE = re.compile(r":::\{include\} \.\./(\w+\.md)\n:::")
ROOT_LINK = re.compile(r"(\]\()(?!https?:|#|\.\./)([^)\s]+\))")


def _from_root(found: re.Match[str]) -> str:
    """A link of a file in the root, as a page of docs/ has it."""
    return found[1] + (found[2].removeprefix("docs/") if found[2].startswith("docs/") else f"../{found[2]}")


def _read(app: Any, name: str, source: list[str]) -> None:
    """Rewrite links that lead out of docs/, and put in what stands in the repository's root."""
    page = Path(app.env.doc2path(name))
    if found := INCLUDE.match(source[0]):
        source[0] = ROOT_LINK.sub(_from_root, (ROOT / found[1]).read_text(encoding="utf-8"))
        app.env.note_dependency(str(ROOT / found[1]))

    def target(found: re.Match[str]) -> str:
        file = (page.parent / (found[2] + found[3])).resolve()
        if DOCS in file.parents or ROOT not in file.parents:
            return found[0]
        inside = str(file.relative_to(ROOT)) + ("/" if file.is_dir() else "")
        up = "../" * (len(page.relative_to(DOCS).parts) - 1)
        if inside in PAGES:
            return f"{found[1]}{up}{PAGES[inside]}{found[4]}"
        if not file.is_file():
            raise ValueError(f"{page.name}: {found[0]} leads to nothing that the site has")
        copied = Path(app.outdir) / "files" / inside
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)
        return f"{found[1]}https://files.invalid/{inside}{found[4]}"

    source[0] = LINK.sub(target, source[0])


def _finish(app: Any, tree: Any, name: str) -> None:
    """Make the links to copied files relative to the page."""
    from docutils import nodes

    up = "../" * (len(Path(app.builder.get_target_uri(name)).parts) - 1)
    for link in tree.findall(nodes.reference):
        address = link.get("refuri", "")
        if address.startswith("https://files.invalid/"):
            link["refuri"] = address.replace("https://files.invalid/", f"{up}files/")
            link["internal"] = True


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
