"""The site: it is built without a warning, every link leads somewhere, and no page loads anything from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import dynamix
from tests.processes import run

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.add(named["href"])
        elif tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.add(named["href"])
        self.loads |= {named["src"]} if "src" in named else set()


@pytest.mark.long
@pytest.mark.slow
def test_the_site_is_built_its_links_lead_somewhere_it_loads_nothing_and_has_all_public_names(tmp_path: Path) -> None:
    """Built as scripts/docs builds it."""
    site = tmp_path / "html"
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "-d", str(tmp_path / "doctrees")]
    assert all(option in (ROOT / "scripts" / "docs").read_text() for option in options[:4])
    run("-m", "sphinx", *options, ROOT / "docs", site, timeout_s=240)
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 60
    broken, foreign = [], []
    for file, page in pages.items():
        foreign += [f"{file.name}: {found}" for found in page.loads if urlsplit(found).netloc]
        for link in page.links | {found for found in page.loads if not found.startswith("data:")}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            known = pages.get(target)
            if not target.is_file() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert not foreign, foreign
    assert not broken, broken
    home = " ".join(re.sub(r"<[^>]+>", "", (site / "index.html").read_text(encoding="utf-8")).split())
    assert "pip install ." in home
    assert "+controller.wrap(model, optimizer)" in home
    sheets = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert "url(http" not in sheets
    assert "@import" not in sheets
    api = "".join(file.read_text(encoding="utf-8") for file in (site / "api").glob("*.html"))
    for name in sorted({*dynamix.__all__} - {"__version__"}):
        assert f'id="dynamix.{name}"' in api or f'id="dynamix.errors.{name}"' in api or f'.{name}"' in api, name


def test_every_public_name_is_on_a_page_of_the_site() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").rglob("*.md"))
    for name in sorted({*dynamix.__all__} - {"__version__"}):
        assert name in pages or hasattr(dynamix.errors, name), name


def test_pictures_are_drawn_again_from_results(tmp_path: Path) -> None:
    """Not compared byte by byte: fonts and versions of Matplotlib may differ."""
    run(ROOT / "scripts" / "pictures", "--out", tmp_path)
    kept = {file.name for file in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert {file.name for file in tmp_path.glob("*.svg")} == kept
    assert all((tmp_path / name).read_text(encoding="utf-8").rstrip().endswith("</svg>") for name in kept)
