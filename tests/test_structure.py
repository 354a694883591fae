"""Rules of the house that import-linter cannot say."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import dynamix
from tests.processes import call, run

SOURCE = Path(dynamix.__file__).parent
ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src/dynamix", ROOT / "homomorphic/src/dynamix_homomorphic", ROOT / "lab/src/dynamix_lab")
FOLDERS = ("src", "homomorphic", "lab", "tests", "examples")
CODE = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
LONGEST_LINE, MOST_SKIPS = 120, 20


def test_policies_never_touch_torch_distributed() -> None:
    for path in (SOURCE / "policies").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            assert not any(name.startswith("torch.distributed") for name in names), path


def test_import_has_no_side_effects_and_leaves_heavy_packages_alone() -> None:
    script = (
        "import os, sys, random; before = dict(os.environ); state = random.getstate()\n"
        "import dynamix, dynamix.compression\n"
        "assert dict(os.environ) == before and random.getstate() == state\n"
        "heavy = {'matplotlib', 'pyroute2', 'gymnasium', 'mnist1d', 'typer', 'fastapi', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run("-c", script)


def drawn(package: Path) -> dict[str, Any]:
    """Rooms, arrows and circles as `scripts/imports` finds them."""
    return dict(json.loads(call(ROOT / "scripts/imports", package, "--json", "--files").stdout))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_circle_of_imports(package: Path) -> None:
    found = drawn(package)
    assert found["circles"] == []
    assert found["file_circles"] == []


def test_the_house_has_few_rooms_and_few_arrows() -> None:
    found = drawn(PACKAGES[0])
    assert len(found["rooms"]) <= 24, found["rooms"]
    assert len(found["arrows"]) <= 95, len(found["arrows"])


def test_the_script_finds_a_circle_behind_a_lazy_import(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "upper").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "upper/__init__.py").write_text("from ..lower import value\n")
    (package / "lower.py").write_text("def value():\n    from house.upper import other\n")
    found = drawn(package)
    assert found["rooms"] == ["__init__", "lower", "upper"]
    assert found["arrows"] == [["lower", "upper"], ["upper", "lower"]]
    assert found["circles"] == [["lower", "upper"]]


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, shared


def test_lines_are_short_and_formatted() -> None:
    lines = [(file, i, line) for file in CODE for i, line in enumerate(file.read_text().splitlines(), 1)]
    long = [f"{file.relative_to(ROOT)}:{i}" for file, i, line in lines if len(line) > LONGEST_LINE]
    skips = [f"{file.relative_to(ROOT)}:{i}" for file, i, line in lines if "# fmt" + ": skip" in line]
    assert not long
    assert len(skips) <= MOST_SKIPS, skips
