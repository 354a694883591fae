"""The network of an emulated cluster: one network namespace a host, joined by a bridge in a namespace of its own.

Nothing is ever added to the namespace the caller lives in. Namespaces are held by file descriptors alone, so the
kernel removes them, links included, when the owner and its ranks are gone: there is nothing to leave behind.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from dynamix.emulator.scenario import Scenario
from dynamix.errors import EmulationError

NETWORK = "198.18.0.0/15"  # RFC 2544: set aside for tests between hosts, never routed
_PREFIX_LENGTH = 15
_CLONE_NEWNET = 0x40000000
_LATENCY_MS = 50
_T = TypeVar("_T")


class Network(Protocol):
    """Where ranks live: `fd` of the namespace a rank enters (-1: none), its address and interface."""

    mechanism: str
    link: str

    def fd(self, host: int) -> int: ...
    def address(self, host: int) -> str: ...
    def interface(self, host: int) -> str: ...
    def close(self) -> None: ...


class Loopback:
    """All ranks on 127.0.0.1 of the caller's own namespace: no privilege, no link rates."""

    mechanism, link = "loopback", "none"

    def fd(self, host: int) -> int:
        return -1

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def interface(self, host: int) -> str:
        return "lo"

    def close(self) -> None:
        """Nothing was made."""


class Namespaces:
    """A namespace, address and (where the scenario says so) link rate per host. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN.

    Raises `EmulationError` when the kernel refuses; nothing is left then.
    """

    mechanism = "netns+veth"

    def __init__(self, scenario: Scenario) -> None:
        self._fds: list[int] = []
        self._switch = -1
        self.link = "tbf" if any(h.rate_mbit_s for h in scenario.hosts) else "none"
        try:
            self._switch = new_namespace()
            for _ in scenario.hosts:
                self._fds.append(new_namespace())
            inside(self._switch, lambda: self._connect(scenario))
            for i, host in enumerate(scenario.hosts):
                inside(self._fds[i], functools.partial(self._configure, i, host.rate_mbit_s))
        except Exception as error:
            self.close()
            raise EmulationError(
                f"cannot make network namespaces ({error}); run as root with the [emulator] extra installed, "
                "or ask for mechanism='duty-cycle'"
            ) from error

    def fd(self, host: int) -> int:
        return self._fds[host]

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}"

    def interface(self, host: int) -> str:
        return f"dynamix{host}"

    def close(self) -> None:
        """Lets go of the namespaces; the kernel removes each when its last process is gone."""
        for fd in (*self._fds, self._switch):
            if fd >= 0:
                os.close(fd)
        self._fds, self._switch = [], -1

    def _connect(self, scenario: Scenario) -> None:
        """In the switch's namespace: the bridge, and a cable from it into every host."""
        with netlink() as ip:
            ip.link("add", ifname="bridge", kind="bridge")
            bridge = ip.link_lookup(ifname="bridge")[0]
            ip.link("set", index=bridge, state="up")
            for i, host in enumerate(scenario.hosts):
                ip.link("add", ifname=f"port{i}", kind="veth",
                        peer={"ifname": self.interface(i), "net_ns_fd": self._fds[i]})  # fmt: skip
                port = ip.link_lookup(ifname=f"port{i}")[0]
                ip.link("set", index=port, master=bridge, state="up")
                if host.rate_mbit_s:
                    _limit_rate(ip, port, host.rate_mbit_s)

    def _configure(self, host: int, rate_mbit_s: float | None) -> None:
        """In a host's namespace: its address, and its side of the link's rate."""
        with netlink() as ip:
            card = ip.link_lookup(ifname=self.interface(host))[0]
            ip.addr("add", index=card, address=self.address(host), prefixlen=_PREFIX_LENGTH)
            for index in (card, ip.link_lookup(ifname="lo")[0]):
                ip.link("set", index=index, state="up")
            if rate_mbit_s:
                _limit_rate(ip, card, rate_mbit_s)


def netlink() -> Any:
    """A netlink socket of the namespace this thread is in; pyroute2 is optional and has no types."""
    return importlib.import_module("pyroute2").IPRoute()


def _limit_rate(ip: Any, index: int, rate_mbit_s: float) -> None:
    """A token bucket for what leaves `index`; its depth is 4 ms of the rate, at least what one segment of TCP needs."""
    bytes_per_s = int(rate_mbit_s * 1e6 / 8)
    burst = max(16 * 1024, bytes_per_s // 250)
    ip.tc("add", "tbf", index, rate=bytes_per_s, burst=burst, latency=f"{_LATENCY_MS}ms")


def inside(fd: int, action: Callable[[], _T]) -> _T:
    """Runs `action` in the network namespace `fd`, in a thread made for it: the caller never leaves its own."""
    return _in_thread(lambda: _system_call("setns", fd, _CLONE_NEWNET), action)


def new_namespace() -> int:
    """A file descriptor of a new, empty network namespace, which lives as long as the descriptor."""
    return _in_thread(
        lambda: _system_call("unshare", _CLONE_NEWNET),
        lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC),
    )


def _in_thread(enter: Callable[[], None], action: Callable[[], _T]) -> _T:
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            enter()
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="dynamix-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
