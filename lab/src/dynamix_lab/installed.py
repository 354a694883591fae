"""Checks for the extra `bench` of dynamix-lab, and says what to install if it is missing."""

from __future__ import annotations

from importlib.util import find_spec

from dynamix.errors import UsageError

BENCH = ("jinja2", "matplotlib", "mnist1d", "sklearn", "scipy", "gymnasium", "pettingzoo")


def how_to_install(extra: str = "") -> str:
    """The command that installs the laboratory, with an extra.

    >>> how_to_install("bench")
    "pip install ./homomorphic './lab[bench]'  (in dynamix's source tree)"
    """
    what = f"./homomorphic './lab[{extra}]'" if extra in ("bench", "dev") else f"'./lab[{extra}]'" if extra else "./lab"
    return f"pip install {what}  (in dynamix's source tree)"


def need_bench(what: str, modules: tuple[str, ...] = BENCH) -> None:
    """Raise `UsageError` unless these modules, of the extra `bench`, are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: {how_to_install('bench')}")
