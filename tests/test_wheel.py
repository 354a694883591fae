"""All distributions are built; their wheels do what they are for in an environment that has what they ask for alone."""

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel of dynamix-train, dynamix-homomorphic and dynamix-lab."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT, ROOT / "homomorphic", ROOT / "lab"):
        _run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], project)
    return folder


class Environment:
    """One without pip, and links to packages that are installed here. Nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.borrowed = folder, folder / "borrowed"
        venv.create(folder / "env", with_pip=False)
        self.python, self.command = (str(folder / "env" / "bin" / name) for name in ("python", "dynamix"))
        self.borrowed.mkdir()
        site = next((folder / "env" / "lib").glob("python*/site-packages"))
        (site / "borrowed.pth").write_text(f"{self.borrowed}\n")

    def borrow(self, names: tuple[str, ...]) -> None:
        for name in _with_requirements(names):
            _link(name, self.borrowed)

    def install(self, wheel: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python", self.python]
        self.run(*pip, "install", "--no-deps", "--no-index", str(wheel))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return _run([*command], self.folder)

    def refused(self, code: int, says: str, *words: str) -> None:
        done = _call([self.command, *words], self.folder)
        assert (done.returncode, says in done.stderr) == (code, True), done.stderr


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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiproc
def test_wheels_do_what_they_are_for_with_what_they_ask_for(built: Path, tmp_path: Path) -> None:
    """Each part adds packages: those that training needs, those of the extra `cli`, the base of the laboratory."""
    (product,), (laboratory,) = (sorted(built.glob(f"dynamix_{name}-*.whl")) for name in ("train", "lab"))
    there = Environment(tmp_path)
    there.borrow(NEEDED)
    there.install(product)
    look = f"import importlib.util as u, dynamix; print([n for n in {NOT_THERE!r} if u.find_spec(n)], dynamix.__file__)"
    assert there.run(there.python, "-c", look).stdout.startswith(f"[] {tmp_path / 'env'}")
    (script := tmp_path / "train.py").write_text((ROOT / "examples" / "train.py").read_text())
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = there.run(there.python, *ranks, str(script), "--epochs", "1")
    assert re.search(r"epoch 0: loss \d", done.stdout), done.stdout
    there.refused(1, "pip install '.[cli]'", "demo")

    there.borrow(CLI)
    said = there.run(there.command, "--help").stdout
    assert all(name in said for name in ("observe", "policy", "report", "doctor"))
    there.refused(2, "pip install ./lab", "emulate", "demo")

    there.borrow(LAB)
    there.install(laboratory)
    assert "hosts" in json.loads(there.run(there.command, "emulate", "demo", "--schema").stdout)["properties"]
    line = ["emulate", "demo", "--mechanism", "duty-cycle", "--out", str(tmp_path / "run"), "--json", "--"]
    ran = there.run(there.command, *line, there.python, "-c", "import dynamix; dynamix.make_policy('pollux')")
    assert json.loads(ran.stdout)["exit_code"] == 0
    for words in (["bench", "overhead"], ["demo"], ["policy", "evaluate"]):
        there.refused(2, "pip install ./homomorphic './lab[bench]'", *words)


def test_the_wheel_holds_the_data_files(built: Path) -> None:
    (wheel,) = built.glob("dynamix_train-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        held = {Path(name).suffix for name in packed.namelist() if name.startswith("dynamix/")}
    assert {".safetensors", ".json", ".typed", ".js", ".css", ".html", ".LICENSE"} <= held


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
