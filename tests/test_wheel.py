"""All distributions are built; the wheel of dynamix-train trains in an environment that has what a job needs alone."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from dynamix import __version__

ROOT = Path(__file__).parent.parent
NEEDED = ("torch", "numpy", "psutil", "safetensors")
CLI = ("typer", "rich", "pydantic")
LAB = ("pyroute2", "pyyaml")
NOT_THERE = ("typer", "rich", "pydantic", "pyroute2", "yaml", "gymnasium", "scipy", "pytest")

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel of dynamix-train, dynamix-homomorphic and dynamix-lab."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT, ROOT / "homomorphic", ROOT / "lab"):
        _run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], project)
    return folder


@pytest.fixture(scope="module")
def empty(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and links to the packages that training needs. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    (wheel,) = built.glob("dynamix_train-*.whl")
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


@pytest.fixture(scope="module")
def with_cli(empty: Path) -> Path:
    """The same environment, and what the extra `cli` asks for."""
    for name in _with_requirements(CLI):
        _link(name, empty / "borrowed")
    return empty


@pytest.fixture(scope="module")
def with_lab(with_cli: Path, built: Path) -> Path:
    """The same environment, with the wheel of dynamix-lab and what that asks for without its extras."""
    for name in _with_requirements(LAB):
        _link(name, with_cli / "borrowed")
    (wheel,) = built.glob("dynamix_lab-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    python = str(with_cli / "env" / "bin" / "python")
    _run([*pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel)], with_cli)
    return with_cli


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
    assert "pip install '.[cli]'" in done.stderr


def test_the_wheel_holds_the_data_files(empty: Path) -> None:
    package = next((empty / "env" / "lib").glob("python*/site-packages/dynamix"))
    held = {file.suffix for file in package.rglob("*")}
    assert {".safetensors", ".json", ".typed", ".js", ".css", ".html", ".LICENSE"} <= held


def test_with_the_extra_cli_the_commands_are_there(with_cli: Path) -> None:
    """Behind those that use less: it adds packages to the environment."""
    said = _run([str(with_cli / "env" / "bin" / "dynamix"), "--help"], with_cli).stdout
    assert all(name in said for name in ("observe", "policy", "report", "doctor"))
    done = _call([str(with_cli / "env" / "bin" / "dynamix"), "emulate", "demo"], with_cli)
    assert (done.returncode, "pip install ./lab" in done.stderr) == (2, True)


def test_the_base_of_the_laboratory_is_what_emulate_needs(with_lab: Path) -> None:
    command = str(with_lab / "env" / "bin" / "dynamix")
    assert "hosts" in json.loads(_run([command, "emulate", "demo", "--schema"], with_lab).stdout)["properties"]
    line = ["emulate", "demo", "--mechanism", "duty-cycle", "--out", str(with_lab / "run"), "--json", "--"]
    python = str(with_lab / "env" / "bin" / "python")
    ran = _run([command, *line, python, "-c", "import dynamix; dynamix.make_policy('pollux')"], with_lab)
    assert json.loads(ran.stdout)["exit_code"] == 0
    for words in (["bench", "stepcount"], ["demo"], ["policy", "evaluate"]):
        done = _call([command, *words], with_lab)
        assert (done.returncode, "pip install ./homomorphic './lab[bench]'" in done.stderr) == (2, True), done.stderr


def _metadata(file: Path) -> Message:
    with zipfile.ZipFile(file) as wheel:
        (name,) = (found for found in wheel.namelist() if found.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def test_all_distributions_say_what_they_are(built: Path) -> None:
    for name in ("dynamix_train", "dynamix_homomorphic", "dynamix_lab"):
        (wheel,) = built.glob(f"{name}-*.whl")
        said = _metadata(wheel)
        assert said["Version"] == __version__
        assert said["License-Expression"] == "Apache-2.0"
        assert said["Requires-Python"] == ">=3.11"
        assert said["Keywords"]
        assert said.get_all("Classifier")
        assert str(said.get_payload()).startswith("# dynamix")
        with zipfile.ZipFile(wheel) as held:
            assert any(found.endswith("licenses/LICENSE") for found in held.namelist())


def test_the_source_distributions_hold_what_a_packager_needs(built: Path) -> None:
    (product,), (laboratory,) = (sorted(built.glob(f"{name}-*.tar.gz")) for name in ("dynamix_train", "dynamix_lab"))
    with tarfile.open(product) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    files = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "constraints.txt")
    assert {*files, "src/dynamix/telemetry/static/uPlot.LICENSE", "docs/index.md", "tests/conftest.py"} <= held
    assert not any(name.startswith(("lab/", "homomorphic/", "build/", ".venv")) for name in held)
    with tarfile.open(laboratory) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())


WHERE_EXTRAS_ARE_TESTED = {
    "cli": "tests/cli", "gpu": "tests/probes/test_device.py", "compression":
    "tests/compression", "dashboard": "tests/telemetry/test_live.py",
    "accelerate": "tests/integrations", "fabric": "tests/integrations", "lightning": "tests/integrations",
    "transformers": "tests/integrations", "ray": "tests/integrations/test_ray.py",
    "torchft": "tests/integrations/test_torchft.py", "docs": "tests/test_site.py", "dev": "tests/conftest.py",
}  # fmt: skip


def test_every_extra_has_a_test(built: Path) -> None:
    (wheel,) = built.glob("dynamix_train-*.whl")
    extras = _metadata(wheel).get_all("Provides-Extra") or []
    assert set(extras) == set(WHERE_EXTRAS_ARE_TESTED)
    assert all((ROOT / path).exists() for path in WHERE_EXTRAS_ARE_TESTED.values())


def test_the_audit_lists_licences_and_finds_none_that_binds_users() -> None:
    done = _call([sys.executable, str(ROOT / "scripts" / "audit"), "--json"], ROOT)
    audit = json.loads(done.stdout)
    assert {"torch", "numpy", "psutil", "safetensors"} <= {row["package"] for row in audit["packages"]}
    assert done.returncode == bool(audit["wrong"])
    assert not [line for line in audit["wrong"] if "GPL" in line]
