"""What of the emulation this machine permits, and how to enable the rest."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from dynamix.emulator import keeper
from dynamix.emulator.hosts import inside, netlink, new_namespace
from dynamix.emulator.limits import Cgroup, DutyCycle, find_cgroup
from dynamix.errors import EmulationError

_count = itertools.count()


def probe_mechanisms() -> dict[str, tuple[bool, str]]:
    """Name -> (available, what it is or how to enable it). Each is tried, in namespaces of its own, and removed.

    network   a host of its own (network namespace, veth) for every rank
    cpu       CPU quotas by control groups
    duty-cycle   the unprivileged substitute
    rate      link rates (tbf)
    delay     delay and loss (netem); reported only, no scenario uses it yet
    """
    return {
        "network": _tried(_probe_namespaces, "network namespaces and veth"),
        "cpu": _tried(_probe_cgroup, "CPU quotas by control groups"),
        "duty-cycle": _tried(_probe_duty_cycle, "CPU shares by signals, on loopback"),
        "rate": _tried(lambda: _probe_queue("tbf"), "link rates (tbf)"),
        "delay": _tried(lambda: _probe_queue("netem"), "delay and loss (netem)"),
    }


def _tried(probe: Callable[[], str], offers: str) -> tuple[bool, str]:
    try:
        return True, probe() or offers
    except Exception as error:
        return False, f"{offers}: {error}"


def _probe_namespaces() -> str:
    _require_pyroute2()
    fd = _namespace()
    try:
        inside(fd, lambda: _add_link("dynamix0"))
    finally:
        os.close(fd)
    return ""


def _probe_cgroup() -> str:
    found = find_cgroup()
    if isinstance(found, str):
        raise EmulationError(found)
    group = Cgroup(found[0], found[1], keeper.instance_name(next(_count) + 1_000_000))
    try:
        group.limit("probe", 0.5)
    finally:
        group.close()
    return f"CPU quotas by {group.mechanism} in {found[0]}"


def _probe_duty_cycle() -> str:
    if not Path("/proc/self/stat").exists():
        raise EmulationError("needs Linux's /proc")
    DutyCycle().close()
    return ""


def _probe_queue(kind: str) -> str:
    _require_pyroute2()
    fd = _namespace()

    def add() -> None:
        index = _add_link("dynamix0")
        settings = {"rate": 1_000_000, "burst": 32768, "latency": "50ms"} if kind == "tbf" else {"delay": 1000}
        with netlink() as ip:
            ip.tc("add", kind, index, **settings)

    try:
        inside(fd, add)
    except Exception as error:
        raise EmulationError(f"the kernel offers no {kind} ({error}); enable it with: modprobe sch_{kind}") from error
    finally:
        os.close(fd)
    return ""


def _require_pyroute2() -> None:
    if importlib.util.find_spec("pyroute2") is None:
        raise EmulationError("pyroute2 is missing; install it with: pip install 'dynamix-train[emulator]'")


def _namespace() -> int:
    try:
        return new_namespace()
    except OSError as error:
        raise EmulationError(f"{error.strerror}; run as root, in containers with --privileged") from error


def _add_link(name: str) -> int:
    with netlink() as ip:
        ip.link("add", ifname=name, kind="veth", peer={"ifname": f"{name}p"})
        return int(ip.link_lookup(ifname=name)[0])
