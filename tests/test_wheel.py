"""The wheel of dynamix-train trains in an empty environment that has what a training job needs and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("torch", "numpy", "psutil", "safetensors")
NOT_THERE = ("typer", "rich", "pydantic", "pyroute2", "yaml", "gymnasium", "scipy", "pytest")

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and links to the packages that training needs. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT)]
    _run([*pip, *build], folder)
    (wheel,) = folder.glob("dynamix_train-*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for name in _with_requirements(NEEDED):
        _link(name, borrowed)
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    _run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], folder)
    return folder


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    """These distributions and what they need themselves, as far as it is installed here."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            left += [re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in required if "extra ==" not in line]
    return found


def _link(name: str, folder: Path) -> None:
    """A link in `folder` to everything that the distribution has put into site-packages."""
    distribution = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    for top in tops:
        there, here = Path(str(distribution.locate_file(top))), folder / top
        if there.suffix != ".pth" and not here.exists():  # several distributions may share a folder
            here.symlink_to(there)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = _call(command, folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done


def _call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in `folder`, where no path leads to the repository."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "COVERAGE_"))}
    environment = {**own, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, env=environment, check=False
    )


def test_the_example_trains_on_two_ranks(empty: Path) -> None:
    python = str(empty / "env" / "bin" / "python")
    look = f"import importlib.util as u, dynamix; print([n for n in {NOT_THERE!r} if u.find_spec(n)], dynamix.__file__)"
    seen, _, path = _run([python, "-c", look], empty).stdout.strip().partition(" ")
    assert seen == "[]"
    assert path.startswith(str(empty / "env"))
    script = empty / "train.py"
    script.write_text((ROOT / "examples" / "train.py").read_text())
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = _run([python, *ranks, str(script), "--epochs", "1"], empty)
    assert re.search(r"epoch 0: loss \d", done.stdout), done.stdout


def test_the_command_says_how_to_install_what_is_missing(empty: Path) -> None:
    done = _call([str(empty / "env" / "bin" / "dynamix"), "demo"], empty)
    assert done.returncode == 1
    assert "pip install 'dynamix-train[cli]'" in done.stderr


def test_the_wheel_holds_the_data_files(empty: Path) -> None:
    package = next((empty / "env" / "lib").glob("python*/site-packages/dynamix"))
    held = {file.suffix for file in package.rglob("*")}
    assert {".safetensors", ".json", ".yaml", ".typed", ".js", ".css", ".html", ".LICENSE"} <= held
