"""A virtual environment for each peer, made once from the requirements in this folder, and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dynamix.errors import ConfigError

REQUIREMENTS = Path(__file__).parent / "requirements"
IMPORTS = {"ddp": "torch", "adaptdl": "adaptdl.torch", "hivemind": "hivemind", "torchft": "torchft"}
INSTALL_TIMEOUT_S = 1200.0
PROBE_TIMEOUT_S = 120.0
_PROBE = """
import importlib, importlib.metadata, json, platform, sys
for name in ("torch", "numpy", sys.argv[1]):
    importlib.import_module(name)
found = {"python": platform.python_version()}
for name in sys.argv[2:]:
    found[name] = importlib.metadata.version(name)
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer's interpreter, and the versions installed in it."""

    python: Path
    versions: dict[str, str]


def default_folder() -> Path:
    """The default folder of environments: in the user's cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "dynamix" / "peers"


def requirements(name: str) -> dict[str, str]:
    """Distribution -> pinned version of environment `name`. Raises `ConfigError` for an unknown one.

    >>> requirements("adaptdl")["adaptdl"]
    '0.2.11'
    """
    path = REQUIREMENTS / f"{name}.txt"
    if not path.is_file():
        raise ConfigError("environment", name, ", ".join(sorted(IMPORTS)), "correct the name")
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line)


def prepare(name: str, folder: Path, *, tell: Callable[[str], None]) -> Environment | str:
    """The environment `folder`/`name`: an existing one if it works, else a new one. A text says why there is none.

    `tell` gets a message before pip runs, which takes minutes, and if versions differ from the pinned ones.
    """
    place, log = folder / name, folder / f"{name}.log"
    python = place / "bin" / "python"
    found = _probe(name, python) if python.exists() else "not made yet"
    if isinstance(found, str):
        tell(f"{name}: making its environment in {place} (pip, some minutes)")
        why = _install(name, place, log)
        found = f"{why} (all of it in {log})" if why else _probe(name, python)
    if isinstance(found, str):
        return found
    other = [f"{n} {found[n]} (pinned: {v})" for n, v in requirements(name).items() if _plain(found[n]) != v]
    if other:
        tell(f"{name}: other versions than pinned: {', '.join(other)}")
    return Environment(python, found)


def _probe(name: str, python: Path) -> dict[str, str] | str:
    """The versions of the pinned packages, if they can be imported; else the error."""
    command = [str(python), "-P", "-c", _PROBE, IMPORTS[name], *requirements(name)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False, env=clean_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    if done.returncode:
        return f"{IMPORTS[name]} cannot be imported: {_last_line(done.stderr)}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _install(name: str, place: Path, log: Path) -> str | None:
    """Make the environment with venv (if there is none) and pip. Returns the error, or None."""
    python = place / "bin" / "python"
    commands = [] if python.exists() else [[sys.executable, "-m", "venv", str(place)]]
    commands += [
        [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-r", str(REQUIREMENTS / f"{name}.txt")],
    ]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as out:
            for command in commands:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=INSTALL_TIMEOUT_S,
                    env=clean_environment(),
                )
    except subprocess.CalledProcessError:
        return f"pip cannot install it: {_last_line(log.read_text(errors='replace'))}"
    except subprocess.TimeoutExpired:
        return f"pip did not end within {INSTALL_TIMEOUT_S:.0f} s"
    except OSError as error:
        return f"its environment cannot be made: {error}"
    return None


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables that would lead another interpreter to our packages."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def _plain(version: str) -> str:
    """A version without its local part, which says how it was built: "2.13.0+cpu" is 2.13.0."""
    return version.partition("+")[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]
