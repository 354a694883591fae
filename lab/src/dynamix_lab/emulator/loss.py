"""Random packet loss by a program in the kernel: nine instructions of BPF at an interface's entrance.

A packet dropped on arrival is lost and its sender does not notice, as on a real link. At an exit the kernel would tell
TCP at once. It needs neither netem nor an iptables program, which many kernels and machines lack. It drops only IP
packets: a lost ARP answer would stop all traffic for a second, which is not a link's behaviour.
"""

import contextlib
import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterator
from typing import Any

from dynamix.errors import EmulationError

_SYSTEM_CALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_BPF_PROG_LOAD = 5
_PROG_TYPE_SCHED_CLS = 3
_PROTOCOL_OFFSET = 16  # of struct __sk_buff
_GET_PRANDOM_U32 = 7
_DROP, _PASS = 2, 0  # TC_ACT_SHOT, TC_ACT_OK
_INGRESS = "ffff:fff2"


def add_entrance(ip: Any, index: int) -> None:
    """Prepares interface `index` for `set_loss`."""
    ip.tc("add", "clsact", index)


def set_loss(ip: Any, index: int, loss: float) -> None:
    """Drop the fraction `loss` of all IP packets that arrive at `index`, independently of each other."""
    how = {"name": "dynamix-loss", "parent": _INGRESS, "prio": 1, "direct_action": True}
    with _loaded(loss) as fd:
        ip.tc("replace-filter", "bpf", index, 1, fd=fd, **how)


def program(loss: float) -> bytes:
    """The instructions for a loss of 0 to 0.5."""
    instructions = (  # code, destination, source, offset, value
        (0x61, 2, 1, _PROTOCOL_OFFSET, 0),  # r2 = skb->protocol
        (0x55, 2, 0, 5, socket.htons(0x0800)),  # not IP: jump to the last two
        (0x85, 0, 0, 0, _GET_PRANDOM_U32),
        (0xB4, 1, 0, 0, round(loss * 2**32)),  # 32 bits, clears the upper half
        (0x3D, 0, 1, 2, 0),  # random >= threshold: jump to the last two
        (0xB4, 0, 0, 0, _DROP),
        (0x95, 0, 0, 0, 0),
        (0xB4, 0, 0, 0, _PASS),
        (0x95, 0, 0, 0, 0),
    )
    little = socket.htons(1) != 1
    return b"".join(
        struct.pack("=BBhI", code, source << 4 | target if little else target << 4 | source, offset, value)
        for code, target, source, offset, value in instructions
    )


@contextlib.contextmanager
def _loaded(loss: float) -> Iterator[int]:
    """A descriptor of the loaded program. A filter that uses the program keeps it after this."""
    number = _SYSTEM_CALL.get(platform.machine())
    if number is None:
        why = "its number of the bpf system call is not known here"
        raise EmulationError(f"no packet loss on {platform.machine()}: {why}")
    code = program(loss)
    instructions, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"Apache-2.0")
    addresses = ctypes.addressof(instructions), ctypes.addressof(licence)
    packed = struct.pack("=IIQQ", _PROG_TYPE_SCHED_CLS, len(code) // 8, *addresses)
    attributes = ctypes.create_string_buffer(packed, 128)
    library = ctypes.CDLL(None, use_errno=True)
    fd = library.syscall(number, _BPF_PROG_LOAD, attributes, len(attributes))
    if fd < 0:
        why = f"the kernel refuses a program that drops packets ({os.strerror(ctypes.get_errno())})"
        raise EmulationError(f"{why}; it needs root and CONFIG_BPF_SYSCALL")
    try:
        yield fd
    finally:
        os.close(fd)
