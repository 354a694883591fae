"""What answers in a throughput measurement, a process on one core: `python -m ... KIND CORE [CERT KEY CA]`.

KIND is `aggregator`, or `echo`: that one sends back to every connection what it brought, so each byte crosses the same
line as often, and nothing is computed but what TLS does. It prints its address. When its standard input ends, an
aggregator prints its statistics, and both end.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import ssl
import sys
import threading
from contextlib import suppress

from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.server import AggregatorServer
from dynamix_homomorphic.aggregator.tls import WOULD_BLOCK, TlsFiles

TOKEN = "the token of a measurement"
ECHO_BYTES = 1 << 19  # received at once: the aggregator's longest chunk


class EchoConnection:
    """What one connection brought and has not been given back."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._bytes = sock, memoryview(bytearray(ECHO_BYTES))
        self._sent = self._filled = 0

    def serve(self) -> int:
        """As much as goes; what to wait for next, 0 at the end."""
        try:
            if self._sent == self._filled and not self._receive():
                return 0
            while self._sent < self._filled:
                self._sent += self.sock.send(self._bytes[self._sent : self._filled])
        except WOULD_BLOCK:
            pass
        except OSError:
            return 0
        return selectors.EVENT_READ if self._sent == self._filled else selectors.EVENT_WRITE

    def _receive(self) -> bool:
        """What is there, up to `ECHO_BYTES`; TLS gives it record by record. False at the end."""
        self._sent, self._filled = 0, 0
        self._filled = self.sock.recv_into(self._bytes)
        if not self._filled:
            return False
        if isinstance(self.sock, ssl.SSLSocket):
            with suppress(*WOULD_BLOCK):
                while self._filled < ECHO_BYTES and (got := self.sock.recv_into(self._bytes[self._filled :])):
                    self._filled += got
        return True


def echo(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    """Serve every connection until the process ends."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                sock, _ = listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = sock if context is None else context.wrap_socket(sock, server_side=True)
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, EchoConnection(sock))
                continue
            wanted = key.data.serve()
            if not wanted:
                selector.unregister(key.data.sock)
                key.data.sock.close()
            elif wanted != key.events:
                selector.modify(key.data.sock, wanted, key.data)


def main(kind: str, core: int, *files: str) -> None:
    """Until standard input ends."""
    logging.disable()  # what is refused here is refused on purpose
    with suppress(OSError, ValueError):  # a container may have fewer cores than it shows; -1 is any
        os.sched_setaffinity(0, {core})
    tls = TlsFiles(*files) if files else None
    if kind == "echo":
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        threading.Thread(target=echo, args=(listener, tls.server() if tls else None), daemon=True).start()
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        sys.stdin.read()
        return
    limits = AggregatorLimits(jobs=64, jobs_per_address=64, address_share=1.0)  # all come from this machine
    with AggregatorServer(token=TOKEN, tls=tls, limits=limits) as server:
        print(server.address, flush=True)
        sys.stdin.read()
        print(json.dumps(server.statistics()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
