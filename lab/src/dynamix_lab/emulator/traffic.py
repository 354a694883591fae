"""Sends and receives UDP over the links of emulated hosts, at a rate for each: other users' traffic.

One process serves all hosts. A socket stays in the network namespace in which it was made, so the process enters each
host once. No process reads the arriving packets: the kernel drops them after the link. A packet that a full link
refuses is not sent again: like a video or a flood, this traffic does not slow down.

It uses the standard library only and runs by path. Arguments: OWNER_PID SWITCH_FD SWITCH_ADDRESS, then FD ADDRESS of
every host. It reads lines `HOST MBIT_S` (0 stops) and ends at end of file or with its owner.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time

PORT = 9  # discard
PAYLOAD = bytes(1400)
PACKET_BITS = 8 * (len(PAYLOAD) + 42)  # including the headers of UDP, IP and Ethernet
TICK_S = 0.005
LATE_S = 0.1  # delays by a busy machine are made up for, up to this
_CLONE_NEWNET = 0x40000000


def open_socket(namespace: int, address: str) -> socket.socket:
    """A UDP socket at `address` in the namespace, which it enters."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        sys.exit(f"cannot enter the emulated host: {os.strerror(ctypes.get_errno())}")
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the smallest possible
    made.bind((address, PORT))
    made.setblocking(False)
    return made


def send(source: socket.socket, address: str, packets: int) -> None:
    """Send packets until one does not fit."""
    with contextlib.suppress(OSError):
        for _ in range(packets):
            source.sendto(PAYLOAD, (address, PORT))


def main(owner: int, switch_fd: int, switch_address: str, hosts: list[tuple[int, str]]) -> None:
    """Run until standard input or the owner ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(-10)
    cards = [open_socket(fd, address) for fd, address in hosts]
    switch = open_socket(switch_fd, switch_address)
    rates = [0.0] * len(hosts)  # bit/s
    due = [0.0] * len(hosts)  # bits
    pending, last = b"", time.monotonic()
    while os.getppid() == owner:  # no end of file comes if a child that the owner forked holds the pipe open
        if select.select([0], [], [], TICK_S if any(rates) else 1.0)[0]:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                host, mbit_s = line.split()
                rates[int(host)], due[int(host)] = 1e6 * float(mbit_s), 0.0
        now = time.monotonic()
        elapsed, last = min(now - last, LATE_S), now
        for i, rate in enumerate(rates):
            packets, due[i] = divmod(due[i] + rate * elapsed, PACKET_BITS)
            send(cards[i], switch_address, int(packets))
            send(switch, hosts[i][1], int(packets))


if __name__ == "__main__":
    pid, fd, at, *rest = sys.argv[1:]
    main(int(pid), int(fd), at, [(int(fd), at) for fd, at in zip(rest[::2], rest[1::2], strict=True)])
