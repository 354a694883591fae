"""Which parts of the emulation this machine permits, and how to enable the others."""

import importlib.util
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamix.errors import EmulationError, ScenarioError
from dynamix_lab.emulator import keeper, links, loss
from dynamix_lab.emulator.hosts import inside, netlink, new_namespace, reason
from dynamix_lab.emulator.limits import Cgroup, DutyCycle, find_cgroup
from dynamix_lab.emulator.scenario import Scenario
from dynamix_lab.installed import how_to_install

_count = itertools.count()
_ENABLE = {
    "tbf": "enable it with: modprobe sch_tbf",
    "netem": "enable it with: modprobe sch_netem",
    "packet loss by BPF": "it needs CONFIG_BPF_SYSCALL, NET_SCH_INGRESS and NET_CLS_BPF",
}


def probe_mechanisms() -> dict[str, tuple[bool, str]]:
    """Name -> (available, what it is or how to enable it). Each is tried in its own namespaces and removed.

    network   a host (network namespace, veth) for every rank
    cpu       CPU quotas by control groups
    duty-cycle   the unprivileged substitute
    rate, loss, latency   of links: by tbf, by a BPF program at the entrance, by netem
    """
    return {
        "network": _tried(_probe_net, "network namespaces and veth"),
        "cpu": _tried(_probe_cgroup, "CPU quotas by control groups"),
        "duty-cycle": _tried(_probe_duty_cycle, "CPU shares by signals, on loopback"),
        "rate": _tried(lambda: _probe_net("tbf", _add_rate), "link rates (tbf)"),
        "loss": _tried(
            lambda: _probe_net("packet loss by BPF", _add_loss), "packet loss (a BPF program in the kernel)"
        ),
        "latency": _tried(lambda: _probe_net("netem", _add_latency), "latency of links (netem)"),
    }


def check_kernel(scenario: Scenario) -> None:
    """Raise `ScenarioError` if this kernel lacks a link feature that the scenario needs. It names the available ones.

    Without the privilege to create a network this cannot be tested, and it does nothing.
    """
    needs = scenario.needs
    if not needs.keys() & {"loss", "latency"}:
        return
    found = probe_mechanisms()
    if not found["network"][0]:
        return
    possible = ", ".join(name for name in ("cpu", "rate", "loss", "latency") if found[name][0])
    for need in ("rate", "loss", "latency"):
        if need in needs and not found[need][0]:
            name, _, value = needs[need].partition("=")
            fix = f"remove it from the scenario; {found[need][1]}"
            raise ScenarioError(name, float(value), f"nothing here but {possible}", fix)


def _tried(probe: Callable[[], str | None], offers: str) -> tuple[bool, str]:
    try:
        return True, probe() or offers
    except Exception as error:
        return False, f"{offers}: {reason(error)}"


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


def _probe_duty_cycle() -> None:
    if not Path("/proc/self/stat").exists():
        raise EmulationError("needs Linux's /proc")
    DutyCycle().close()


def _add_rate(ip: Any, index: int) -> None:
    links.set_rate(ip, index, 8.0, delayed=False)


def _add_latency(ip: Any, index: int) -> None:
    links.set_latency(ip, index, 1.0)
    links.set_rate(ip, index, 8.0, delayed=True)


def _add_loss(ip: Any, index: int) -> None:
    loss.add_entrance(ip, index)
    loss.set_loss(ip, index, 0.1)
    links.send_single_packets(ip, index)


def _probe_net(kind: str = "", add: Callable[[Any, int], None] | None = None) -> None:
    """Make a veth in its own namespace, and add to it the feature that `kind` names."""
    if importlib.util.find_spec("pyroute2") is None:
        raise EmulationError(f"pyroute2 is missing: {how_to_install()}")
    try:
        fd = new_namespace()
    except OSError as error:
        raise EmulationError(f"{error.strerror}; run as root, in containers with --privileged") from error

    def work() -> None:
        with netlink() as ip:
            ip.link("add", ifname="dynamix0", kind="veth", peer={"ifname": "dynamix0p"})
            if add is not None:
                add(ip, int(ip.link_lookup(ifname="dynamix0")[0]))

    try:
        inside(fd, work)
    except Exception as error:
        if add is None:
            raise
        raise EmulationError(f"the kernel offers no {kind} ({reason(error)}); {_ENABLE[kind]}") from error
    finally:
        os.close(fd)
