"""Counts the kernel's retransmissions on this worker's connections by tracepoints, with bpftrace (eBPF).

Optional: TCP_INFO (`network.py`) gives the same without privileges, but only for connections that are open when it is
read. `DYNAMIX_BPF=1` enables this probe; each rank then runs its own tracer.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from dynamix.probes.network import master_port, open_connections, ports

VARIABLE = "DYNAMIX_BPF"
_EVENTS = (Path("/sys/kernel/tracing/events"), Path("/sys/kernel/debug/tracing/events"))
_RETRANSMIT, _SEND = "tcp/tcp_retransmit_skb", "sock/sock_send_length"
_EVERY_MS = 200
# Keys are ports in host byte order, without addresses: no two of this worker's connections have both ports in common.
_COUNT = "tracepoint:tcp:tcp_retransmit_skb { @again[args->sport, args->dport] = count(); }"
# The length is the call's return value, so errors are negative; 6 is TCP. Kernels from 6.3 on have this tracepoint.
_SENDS = "/pid == %d && args->protocol == 6 && args->ret > 0/"
_BYTES = f"tracepoint:sock:sock_send_length {_SENDS} {{ @sent = sum(args->ret); }}"
_TELL = 'interval:ms:%d { print(@again); clear(@again); %sprintf("told\\n"); }'
_TELL_BYTES = "print(@sent); clear(@sent); "


class BpfProbe:
    """Reads the kernel's tracepoints about this process's own connections.

    retransmits_per_s   segments sent again (tcp:tcp_retransmit_skb), on connections that this process has or had,
                        identified by their ports; without those of the rendezvous store
    bytes_per_s         payload handed to TCP (sock:sock_send_length), if the kernel has that tracepoint and the process
                        is not in its own process namespace

    A figure without data is omitted, so that `NetworkProbe`'s value remains. Needs root, bpftrace and a mounted
    tracefs; without them it never answers. The tracer ends with this object, with `close`, or with the process.
    """

    name = "bpf"

    def __init__(self, *, store_port: int | None = None) -> None:
        self._store_port = master_port() if store_port is None else store_port
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._again: Counter[tuple[int, int]] = Counter()
        self._own: set[tuple[int, int]] = set()
        self._sent, self._told, self._before, self._sampled_at = 0, False, (0, 0), math.nan
        self._tracer = self._start() if self.detect()[0] else None

    @classmethod
    def wanted(cls) -> bool:
        """Whether the environment enables this probe."""
        return os.environ.get(VARIABLE) == "1"

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(available, why or how). Only reads files; the tracer is tried when the probe is wanted."""
        if not sys.platform.startswith("linux"):
            return False, f"eBPF is Linux's, this is {sys.platform}"
        missing = []
        if shutil.which("bpftrace") is None:
            missing.append("install it: apt-get install bpftrace")
        if os.geteuid() != 0:
            missing.append("run as root (in containers with --privileged)")
        elif _events(_RETRANSMIT) is None:
            missing.append("mount the kernel's tracepoints: mount -t tracefs tracefs /sys/kernel/tracing")
        if missing:
            return False, "optional, TCP_INFO is used without it; to have it: " + "; ".join(missing)
        has = "retransmissions and bytes" if _events(_SEND) else "retransmissions"
        state = "on" if cls.wanted() else f"off, TCP_INFO is used; {VARIABLE}=1 turns it on"
        return True, f"bpftrace counts {has} at the kernel's tracepoints ({state})"

    def sample(self) -> dict[str, float]:
        """`retransmits_per_s`, and `bytes_per_s` if available, since the previous sample; empty without data."""
        if self._tracer is None or self._tracer.poll() is not None:
            return {}
        self._own |= self._connections()
        with self._lock:
            told, sent = self._told, self._sent
            again = sum(self._again[key] for key in self._own)
            # Only own connections count, and on a busy host a long job would collect all others, too.
            for key in [key for key in self._again if key not in self._own]:
                del self._again[key]
        now = time.perf_counter()
        elapsed, self._sampled_at = now - self._sampled_at, now
        before, self._before = self._before, (again, sent)
        if not told or not elapsed > 0:
            return {}
        bytes_known = {"bytes_per_s": (sent - before[1]) / elapsed} if sent else {}
        return {"retransmits_per_s": max(0.0, (again - before[0]) / elapsed), **bytes_known}

    def close(self) -> None:
        """End the tracer. Safe to call twice, and in a forked child, where it does nothing."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None and os.getpid() == self._pid:
            tracer.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                tracer.wait(2)
            if tracer.stdout is not None:
                tracer.stdout.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _start(self) -> subprocess.Popen[bytes] | None:
        sending = _events(_SEND) is not None
        program = [_COUNT, _TELL % (_EVERY_MS, _TELL_BYTES if sending else "")]
        if sending:
            program.append(_BYTES % self._pid)
        try:
            # A closed pipe ends the tracer when this process is killed, because it prints five times a second.
            command, nowhere = ["bpftrace", "-f", "json", "-e", " ".join(program)], subprocess.DEVNULL
            tracer = subprocess.Popen(
                command, stdin=nowhere, stdout=subprocess.PIPE, stderr=nowhere, start_new_session=True
            )
        except OSError:
            return None
        threading.Thread(target=self._read, args=(tracer,), name="dynamix-bpf", daemon=True).start()
        return tracer

    def _read(self, tracer: subprocess.Popen[bytes]) -> None:
        assert tracer.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed by `close`
            for line in tracer.stdout:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # foreign lines
                    self._take(json.loads(line))

    def _take(self, message: dict[str, object]) -> None:
        kind, data = message["type"], message.get("data")
        if kind == "printf":
            self._told = True
        if kind != "map" or not isinstance(data, dict):
            return
        with self._lock:
            for key, count in (data.get("@again") or {}).items():
                local, _, remote = key.partition(",")
                self._again[int(local), int(remote)] += int(count)
            self._sent += int(data.get("@sent") or 0)

    def _connections(self) -> set[tuple[int, int]]:
        """(local, remote) ports of this process's connections, except the store's."""
        pairs = (ports(fd) for fd, _ in open_connections().values())
        return {pair for pair in pairs if self._store_port not in pair}


def _events(name: str) -> Path | None:
    """The folder of a tracepoint, None if it is not visible."""
    found = (folder / name for folder in _EVENTS)
    return next((folder for folder in found if (folder / "format").exists()), None)
