"""Rules of the house that import-linter cannot say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import dynamix

SOURCE = Path(dynamix.__file__).parent


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
        "import dynamix\n"
        "assert dict(os.environ) == before and random.getstate() == state\n"
        "heavy = {'matplotlib', 'pyroute2', 'gymnasium', 'mnist1d', 'typer', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
