"""The laboratory's rows of `dynamix doctor`: what this machine can emulate, and which parts are installed."""

from __future__ import annotations

from importlib.util import find_spec

from dynamix_lab.installed import BENCH, how_to_install


def emulation() -> list[tuple[str, bool, str]]:
    """Mechanisms that limit emulated hosts. Device hosts need none of them."""
    from dynamix_lab.emulator import probe_mechanisms

    device = ("device hosts", True, "relative speeds, as in device-demo: they need no privilege and no kernel feature")
    return [*((name, *found) for name, found in probe_mechanisms().items()), device]


def laboratory() -> list[tuple[str, bool, str]]:
    """Parts of dynamix-lab.

    >>> [name for name, _, _ in laboratory()]
    ['emulate', 'bench']
    """
    missing = [name for name in BENCH if find_spec(name) is None]
    bench = f"{', '.join(missing)} missing: {how_to_install('bench')}" if missing else ", ".join(BENCH)
    return [("emulate", True, "emulate"), ("bench", not missing, bench)]
