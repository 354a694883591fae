"""Privileged tests skip with a reason where the machine refuses; where they are required, that is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dynamix
from dynamix_lab.emulator import Emulation, keeper
from dynamix_lab.emulator.limits import find_cgroup
from dynamix_lab.emulator.mechanisms import probe_mechanisms

PYTHON = [sys.executable, "-I", "-S", "-c"]


@pytest.fixture(scope="session")
def _missing() -> str:
    found = probe_mechanisms()
    return "; ".join(why for name in ("network", "cpu", "rate", "loss") for ok, why in [found[name]] if not ok)


@pytest.fixture
def privileged(_missing: str) -> None:
    """Namespaces and control groups can be made here."""
    if _missing:
        if os.environ.get("CI") == "true" or os.environ.get("DYNAMIX_REQUIRE_EMULATOR") == "1":
            pytest.fail(f"emulator tests are required here, but: {_missing}")
        pytest.skip(_missing)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test: no process, control group or folder of an emulation of this process."""
    yield
    mine = f"-{os.getpid()}-{keeper.start_time(os.getpid())}-"
    assert not [name for name in traces() if mine in name]


def enter(*scenario: Any, **options: Any) -> None:
    """Make hosts, and end them."""
    with Emulation(*scenario, **options):
        pass


def traces() -> set[str]:
    """Names of all emulations of which anything exists."""
    found = find_cgroup()
    folders = [Path(tempfile.gettempdir())] + ([] if isinstance(found, str) else [found[0]])
    names = {entry.name for folder in folders for entry in folder.iterdir()} | set(keeper.marked_processes())
    return {name for name in names if name.startswith("dynamix-") and name.count("-") == 4}


def wait_until_gone(name: str, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while name in traces():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# Without the package's front page, which imports torch: the emulator does not need it.
WITHOUT_TORCH = "import sys, types; package = types.ModuleType('dynamix'); package.__path__ = [sys.argv[1]]\n"
WITHOUT_TORCH += "sys.modules['dynamix'] = package\n"


@contextmanager
def owner(program: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process whose program runs an emulation, and that one's name, which the program prints first.

    The arguments are `sys.argv[2:]`.
    """
    command = [sys.executable, "-c", WITHOUT_TORCH + program, dynamix.__path__[0], *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        name = process.stdout.readline().strip()
        assert name, process.stderr.read()
        assert name in traces()
        yield process, name
    finally:
        process.kill()
        process.communicate()
