"""The network of an emulated cluster: one network namespace per host, joined by a bridge in its own namespace.

Nothing is ever added to the caller's namespace. Only file descriptors hold the namespaces. When the owner and its ranks
have ended, the kernel removes them with all links, queues and programs, so nothing is left behind.
"""

import ctypes
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from dynamix.errors import EmulationError
from dynamix_lab.emulator import links, loss
from dynamix_lab.emulator.background import Traffic
from dynamix_lab.emulator.scenario import Scenario
from dynamix_lab.emulator.schedule import Link, host_links

_SWITCH_ADDRESS = "198.19.255.254"  # in 198.18.0.0/15 (RFC 2544): reserved for tests between hosts, never routed
_PREFIX_LENGTH = 15
_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


class Network(Protocol):
    """A rank's network: the `fd` of its namespace (-1: none), its address and interface, and the states of links.

    `switch` is the namespace and address between the hosts, without a link of its own.
    """

    mechanism: str
    link: str

    def fd(self, host: int) -> int: ...
    def switch(self) -> tuple[int, str]: ...
    def address(self, host: int) -> str: ...
    def interface(self, host: int) -> str: ...
    def set_links(self, states: Sequence[Link]) -> None: ...
    def plug(self, host: int, *, plugged: bool) -> None: ...
    def part(self, parts: Sequence[Sequence[int]]) -> None: ...
    def close(self) -> None: ...


class Loopback:
    """All ranks on 127.0.0.1 in the caller's namespace: needs no privilege, but cannot limit links."""

    mechanism, link = "loopback", "none"

    def fd(self, host: int) -> int:
        return -1

    def switch(self) -> tuple[int, str]:
        return -1, "127.0.0.1"

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def interface(self, host: int) -> str:
        return "lo"

    def set_links(self, states: Sequence[Link]) -> None:
        """Do nothing: scenarios that shape links have been refused."""

    def plug(self, host: int, *, plugged: bool) -> None:
        raise EmulationError("hosts on loopback have no cable: run as root with pyroute2 installed")

    def part(self, parts: Sequence[Sequence[int]]) -> None:
        raise EmulationError("loopback cannot be parted: run as root with pyroute2 installed")

    def close(self) -> None:
        """Do nothing: nothing was created."""


class Namespaces:
    """A namespace, an address and a link per host. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN.

    Traffic that a host sends is shaped at its own card and lost at the switch's port. Traffic that it receives is
    shaped at the port and lost at the card. Raises `EmulationError`, and leaves nothing, if the kernel refuses.
    """

    mechanism = "netns+veth"

    def __init__(self, scenario: Scenario) -> None:
        self._needs = frozenset(scenario.needs)
        made = {"rate": "tbf", "latency": "netem", "loss": "bpf", "traffic": "udp"}
        self.link = "+".join(made[need] for need in made if need in self._needs) or "none"
        self._fds: list[int] = []
        self._switch = -1
        self._states = [Link()] * scenario.workers
        self._traffic: Traffic | None = None
        try:
            self._switch = new_namespace()
            for _ in scenario.hosts:
                self._fds.append(new_namespace())
            self._ports = inside(self._switch, self._connect)
            self._cards = [inside(fd, functools.partial(self._configure, i)) for i, fd in enumerate(self._fds)]
            if "traffic" in self._needs:
                addresses = [self.address(i) for i in range(scenario.workers)]
                self._traffic = Traffic(*self.switch(), self._fds, addresses)
            self.set_links(host_links(scenario, None))
        except Exception as error:
            self.close()
            fix = "run as root with pyroute2 installed, or ask for mechanism='duty-cycle'"
            raise EmulationError(f"cannot make network namespaces ({reason(error)}); {fix}") from error

    def fd(self, host: int) -> int:
        return self._fds[host]

    def switch(self) -> tuple[int, str]:
        """Gives the switch an address on first use. Without one it does not answer to the hosts."""

        def give_address() -> None:
            with netlink() as ip:
                bridge = ip.link_lookup(ifname="bridge")[0]
                ip.addr("replace", index=bridge, address=_SWITCH_ADDRESS, prefixlen=_PREFIX_LENGTH)

        inside(self._switch, give_address)
        return self._switch, _SWITCH_ADDRESS

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}"

    def interface(self, host: int) -> str:
        return f"dynamix{host}"

    def set_links(self, states: Sequence[Link]) -> None:
        """Change every link whose state differs."""
        before, self._states = self._states, list(states)
        changed = [(i, *pair) for i, pair in enumerate(zip(before, states, strict=True)) if pair[0] != pair[1]]
        shaped = [(i, old, new) for i, old, new in changed if _shape(old) != _shape(new)]
        if shaped:
            ports = [(self._ports[i], old.down_mbit_s, new.down_mbit_s, old, new) for i, old, new in shaped]
            inside(self._switch, lambda: self._set(ports))
        for i, old, new in shaped:
            card = (self._cards[i], old.up_mbit_s, new.up_mbit_s, old, new)
            inside(self._fds[i], functools.partial(self._set, [card]))
        for i, old, new in changed:
            if self._traffic is not None and new.background_mbit_s != old.background_mbit_s:
                self._traffic.set_rate(i, new.background_mbit_s)

    def plug(self, host: int, *, plugged: bool) -> None:
        """Disconnect the host from the switch, or connect it again."""

        def switch_port() -> None:
            with netlink() as ip:
                ip.link("set", index=self._ports[host], state="up" if plugged else "down")

        inside(self._switch, switch_port)

    def part(self, parts: Sequence[Sequence[int]]) -> None:
        """Make a bridge for each part. The first part keeps the existing one, and with it the switch's address."""

        def move_ports() -> None:
            with netlink() as ip:
                for number, hosts in enumerate(parts):
                    name = f"bridge{number or ''}"
                    found = ip.link_lookup(ifname=name)
                    if not found:
                        ip.link("add", ifname=name, kind="bridge")
                        found = ip.link_lookup(ifname=name)
                        ip.link("set", index=found[0], state="up")
                    for host in hosts:
                        ip.link("set", index=self._ports[host], master=found[0])

        inside(self._switch, move_ports)

    def close(self) -> None:
        """Release the namespaces; the kernel removes each when its last process ends."""
        if self._traffic is not None:
            self._traffic.close()
        for fd in (*self._fds, self._switch):
            if fd >= 0:
                os.close(fd)
        self._fds, self._switch, self._traffic = [], -1, None

    def _connect(self) -> list[int]:
        """Make the bridge in the switch's namespace, and cables into the hosts. Returns the ports' indices."""
        ports = []
        with netlink() as ip:
            ip.link("add", ifname="bridge", kind="bridge")
            bridge = ip.link_lookup(ifname="bridge")[0]
            ip.link("set", index=bridge, state="up")
            for i, fd in enumerate(self._fds):
                ip.link("add", ifname=f"port{i}", kind="veth", peer={"ifname": self.interface(i), "net_ns_fd": fd})
                port = ip.link_lookup(ifname=f"port{i}")[0]
                ip.link("set", index=port, master=bridge, state="up")
                ports.append(port)
                self._prepare(ip, port)
        return ports

    def _configure(self, host: int) -> int:
        """Give a host its address, in its namespace. Returns its card's index."""
        with netlink() as ip:
            card = int(ip.link_lookup(ifname=self.interface(host))[0])
            ip.addr("add", index=card, address=self.address(host), prefixlen=_PREFIX_LENGTH)
            self._prepare(ip, card)
            if "loss" in self._needs:
                links.send_single_packets(ip, card)
            for index in (card, ip.link_lookup(ifname="lo")[0]):
                ip.link("set", index=index, state="up")
        return card

    def _prepare(self, ip: Any, index: int) -> None:
        if "loss" in self._needs:
            loss.add_entrance(ip, index)
        if "latency" in self._needs:
            links.set_latency(ip, index, 0)

    def _set(self, interfaces: Sequence[tuple[int, float | None, float | None, Link, Link]]) -> None:
        """Update exit and entrance of interfaces (index, old rate, new rate, old state, new state) if they changed."""
        with netlink() as ip:
            for index, old_rate, rate, old, new in interfaces:
                if old.latency_ms != new.latency_ms:
                    links.set_latency(ip, index, new.latency_ms)
                if old_rate != rate:
                    links.set_rate(ip, index, rate, delayed="latency" in self._needs)
                if old.loss != new.loss:
                    loss.set_loss(ip, index, new.loss)


def _shape(state: Link) -> Link:
    """The part of a link's state that needs queues and programs."""
    return dataclasses.replace(state, background_mbit_s=0.0)


def netlink() -> Any:
    """A netlink socket of this thread's namespace. pyroute2 is optional and has no types."""
    return importlib.import_module("pyroute2").IPRoute()


def reason(error: Exception) -> str:
    """The text of an error of the kernel: OSError and pyroute2's errors hold (number, text).

    >>> reason(OSError(2, "No such file or directory")), reason(ValueError("no link"))
    ('No such file or directory', 'no link')
    """
    return str(error.args[1] if len(error.args) == 2 else error)


def inside(fd: int, action: Callable[[], _T]) -> _T:
    """Run `action` in the network namespace `fd`, in a thread of its own, so that the caller never leaves its own."""
    return _in_thread(action, "setns", fd, _CLONE_NEWNET)


def new_namespace() -> int:
    """A file descriptor of a new, empty network namespace, which exists as long as the descriptor."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    return _in_thread(lambda: os.open("/proc/thread-self/ns/net", flags), "unshare", _CLONE_NEWNET)


def _in_thread(action: Callable[[], _T], system_call: str, *arguments: int) -> _T:
    def work() -> _T:
        if getattr(ctypes.CDLL(None, use_errno=True), system_call)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{system_call}: {os.strerror(number)}")
        return action()

    with ThreadPoolExecutor(1, thread_name_prefix="dynamix-namespace") as made:
        return made.submit(work).result()
