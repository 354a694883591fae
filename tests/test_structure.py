"""Rules of the house that import-linter cannot say; figures may only fall (`scripts/house.json`)."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.processes import call, run

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src/dynamix", ROOT / "homomorphic/src/dynamix_homomorphic", ROOT / "lab/src/dynamix_lab")


@pytest.mark.timeout(300)
def test_no_figure_is_above_its_threshold() -> None:
    run(ROOT / "scripts/house", "--check", timeout_s=290)


def test_policies_never_touch_torch_distributed() -> None:
    for path in (PACKAGES[0] / "policies").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            assert not any(name.startswith("torch.distributed") for name in names), path


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_circle_of_imports(package: Path) -> None:
    found = json.loads(call(ROOT / "scripts/imports", package, "--json", "--files").stdout)
    assert found["circles"] == []
    assert found["file_circles"] == []
    if package == PACKAGES[0]:
        assert len(found["rooms"]) <= 24, found["rooms"]
        assert len(found["arrows"]) <= 95, len(found["arrows"])


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in (file for package in PACKAGES for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, shared
