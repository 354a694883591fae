"""What the extra `bench` of dynamix-lab brings, and a word where it is missing."""

from __future__ import annotations

from importlib.util import find_spec

from dynamix.errors import UsageError

BENCH = ("jinja2", "matplotlib", "mnist1d", "sklearn", "scipy", "gymnasium", "pettingzoo")
INSTALL_BENCH = "pip install './lab[bench]'  (in dynamix's source tree)"


def need_bench(what: str) -> None:
    """Raises `UsageError` unless all of the extra is there."""
    missing = [name for name in BENCH if find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: {INSTALL_BENCH}")
