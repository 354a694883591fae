"""The network of an emulated cluster: one network namespace a host, joined by a bridge in a namespace of its own.

Nothing is ever added to the namespace the caller lives in. Namespaces are held by file descriptors alone, so the
kernel removes them, links, queues and programs included, when the owner and its ranks are gone: there is nothing to
leave behind.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from dynamix.emulator import links, loss
from dynamix.emulator.background import Traffic
from dynamix.emulator.scenario import Scenario
from dynamix.emulator.schedule import Link, host_links
from dynamix.errors import EmulationError

NETWORK = "198.18.0.0/15"  # RFC 2544: set aside for tests between hosts, never routed
_SWITCH_ADDRESS = "198.19.255.254"
_PREFIX_LENGTH = 15
_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


class Network(Protocol):
    """Where ranks live: `fd` of the namespace a rank enters (-1: none), its address and interface; states of links.

    `switch` is the place between the hosts: namespace and address, behind no link of its own.
    """

    mechanism: str
    link: str

    def fd(self, host: int) -> int: ...
    def switch(self) -> tuple[int, str]: ...
    def address(self, host: int) -> str: ...
    def interface(self, host: int) -> str: ...
    def set_links(self, states: Sequence[Link]) -> None: ...
    def close(self) -> None: ...


class Loopback:
    """All ranks on 127.0.0.1 of the caller's own namespace: no privilege, and links that cannot be limited."""

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
        """Scenarios that ask anything of links are refused before."""

    def close(self) -> None:
        """Nothing was made."""


class Namespaces:
    """A namespace, an address and a link per host. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN.

    What a host sends is shaped at its own card and lost at the switch's port, what it receives shaped at the port and
    lost at the card. Raises `EmulationError` when the kernel refuses; nothing is left then.
    """

    mechanism = "netns+veth"

    def __init__(self, scenario: Scenario) -> None:
        self._needs = frozenset(scenario.needs)
        self.link = link_mechanisms(scenario)
        self._fds: list[int] = []
        self._switch = -1
        self._cards: list[int] = []
        self._ports: list[int] = []
        self._states = [Link()] * scenario.workers
        self._traffic: Traffic | None = None
        try:
            self._switch = new_namespace()
            for _ in scenario.hosts:
                self._fds.append(new_namespace())
            inside(self._switch, self._connect)
            for i, fd in enumerate(self._fds):
                self._cards.append(inside(fd, functools.partial(self._configure, i)))
            if "traffic" in self._needs:
                addresses = [self.address(i) for i in range(scenario.workers)]
                self._traffic = Traffic(self._switch, _SWITCH_ADDRESS, self._fds, addresses)
            self.set_links(host_links(scenario, None))
        except Exception as error:
            self.close()
            raise EmulationError(
                f"cannot make network namespaces ({error}); run as root with the [emulator] extra installed, "
                "or ask for mechanism='duty-cycle'"
            ) from error

    def fd(self, host: int) -> int:
        return self._fds[host]

    def switch(self) -> tuple[int, str]:
        """The switch gets an address when somebody asks: without one nothing of it answers to the hosts."""
        inside(self._switch, self._give_address)
        return self._switch, _SWITCH_ADDRESS

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}"

    def interface(self, host: int) -> str:
        return f"dynamix{host}"

    def set_links(self, states: Sequence[Link]) -> None:
        """Brings every link that is in another state into this one."""
        before, self._states = self._states, list(states)
        changed = [i for i, state in enumerate(states) if _shape(state) != _shape(before[i])]
        if changed:
            inside(self._switch, lambda: self._set_ports(changed, before))
        for i in changed:
            inside(self._fds[i], functools.partial(self._set_card, i, before[i]))
        for i, state in enumerate(states):
            if self._traffic is not None and state.background_mbit_s != before[i].background_mbit_s:
                self._traffic.set_rate(i, state.background_mbit_s)

    def close(self) -> None:
        """Lets go of the namespaces; the kernel removes each when its last process is gone."""
        if self._traffic is not None:
            self._traffic.close()
        for fd in (*self._fds, self._switch):
            if fd >= 0:
                os.close(fd)
        self._fds, self._switch, self._traffic = [], -1, None

    def _connect(self) -> None:
        """In the switch's namespace: the bridge, and a cable from it into every host."""
        with netlink() as ip:
            ip.link("add", ifname="bridge", kind="bridge")
            bridge = ip.link_lookup(ifname="bridge")[0]
            ip.link("set", index=bridge, state="up")
            if "traffic" in self._needs:
                ip.addr("add", index=bridge, address=_SWITCH_ADDRESS, prefixlen=_PREFIX_LENGTH)
            for i, fd in enumerate(self._fds):
                ip.link("add", ifname=f"port{i}", kind="veth", peer={"ifname": self.interface(i), "net_ns_fd": fd})
                port = ip.link_lookup(ifname=f"port{i}")[0]
                ip.link("set", index=port, master=bridge, state="up")
                self._ports.append(port)
                self._prepare(ip, port)

    def _give_address(self) -> None:
        with netlink() as ip:
            bridge = ip.link_lookup(ifname="bridge")[0]
            ip.addr("replace", index=bridge, address=_SWITCH_ADDRESS, prefixlen=_PREFIX_LENGTH)

    def _configure(self, host: int) -> int:
        """In a host's namespace: its address. Returns its card's index."""
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

    def _set_ports(self, hosts: Sequence[int], before: Sequence[Link]) -> None:
        with netlink() as ip:
            for i in hosts:
                old, new = before[i], self._states[i]
                self._set(ip, self._ports[i], (old.down_mbit_s, new.down_mbit_s), old, new)

    def _set_card(self, host: int, old: Link) -> None:
        with netlink() as ip:
            new = self._states[host]
            self._set(ip, self._cards[host], (old.up_mbit_s, new.up_mbit_s), old, new)

    def _set(self, ip: Any, index: int, rates: tuple[float | None, float | None], old: Link, new: Link) -> None:
        """Interface `index`: its rate from one to the other, latency and loss as in `new`."""
        if old.latency_ms != new.latency_ms:
            links.set_latency(ip, index, new.latency_ms)
        if rates[0] != rates[1]:
            links.set_rate(ip, index, rates[1], delayed="latency" in self._needs)
        if old.loss != new.loss:
            loss.set_loss(ip, index, new.loss)


def _shape(state: Link) -> Link:
    """What queues and programs make of it."""
    return dataclasses.replace(state, background_mbit_s=0.0)


def link_mechanisms(scenario: Scenario) -> str:
    """What links will be made of, such as "tbf+bpf"; "none" for plain ones."""
    made = {"rate": "tbf", "latency": "netem", "loss": "bpf", "traffic": "udp"}
    return "+".join(made[need] for need in made if need in scenario.needs) or "none"


def netlink() -> Any:
    """A netlink socket of the namespace this thread is in; pyroute2 is optional and has no types."""
    return importlib.import_module("pyroute2").IPRoute()


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
