"""Leaves nothing behind: finds and removes what an emulation created, however it ended.

Every emulation has a name, `dynamix-<pid namespace>-<owner pid>-<owner start time>-<count>`. Its control groups have
that name, and its processes have it in their environment. So the name alone proves that the owner has ended: no process
of this pid namespace has that pid and start time.

Run as a script this is the keeper: it outlives its owner (even kill -9) just long enough to clean up. It uses the
standard library only and is started by path, so that it starts at once and without torch.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

MARK = "DYNAMIX_EMULATED"
_NAME = re.compile(r"^dynamix-(\d+)-(\d+)-(\d+)-(\d+)$")


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of process `pid`; None if there is none or it is a zombie."""
    try:
        # The command in parentheses may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def instance_name(count: int) -> str:
    """The name of the calling process's emulation number `count`."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"dynamix-{namespace}-{os.getpid()}-{start_time(os.getpid())}-{count}"


def is_abandoned(name: str) -> bool:
    """True only if `name` is an emulation of this pid namespace and its owner has provably ended."""
    match = _NAME.match(name)
    if match is None or int(match[1]) != os.stat("/proc/self/ns/pid").st_ino:
        return False
    return start_time(int(match[2])) != int(match[3])


def private_folder(name: str) -> Path:
    """The folder for the socket of emulation `name`. In the run folder its path could exceed 107 characters."""
    folder = Path(tempfile.gettempdir()) / name
    return folder if len(str(folder)) < 96 else Path("/tmp") / name


def marked_processes() -> dict[str, list[int]]:
    """Maps emulations' names to the pids that carry them, for all processes that this user may inspect."""
    found: dict[str, list[int]] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                key, _, name = variable.partition(b"=")
                if key == MARK.encode():
                    found.setdefault(name.decode(errors="replace"), []).append(pid)
    return found


def remove(name: str, roots: Sequence[Path], *, timeout_s: float = 10.0) -> bool:
    """Kill the processes of emulation `name` and remove its control groups under `roots`. True if all are gone."""
    deadline = time.monotonic() + timeout_s
    while True:
        groups = [root / name for root in roots if (root / name).is_dir()]
        pids = set(marked_processes().get(name, []))
        for group in groups:
            inside: set[int] = set()
            for folder, _, _ in os.walk(group):  # glob fails if another sweep removes some meanwhile
                with contextlib.suppress(OSError):
                    inside.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
            for pid in inside:
                # First out of the group: throttled they die slowly, and an unreaped zombie keeps its group busy.
                with contextlib.suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(str(pid))
            pids |= inside
        for pid in pids - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            for folder in (each for group in groups for each, _, _ in os.walk(group, topdown=False)):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            shutil.rmtree(private_folder(name), ignore_errors=True)
            if not any(group.is_dir() for group in groups):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def sweep(roots: Sequence[Path]) -> list[str]:
    """Remove what emulations left whose owner has provably ended. Returns their names. Skips running ones."""
    names = set(marked_processes())
    for root in (*roots, private_folder("").parent):
        with contextlib.suppress(OSError):
            names |= {entry.name for entry in root.iterdir()}
    abandoned = sorted(filter(is_abandoned, names))
    for name in abandoned:
        remove(name, roots)
    return abandoned


def main(name: str, roots: list[str]) -> None:
    """Wait until the owner of `name` sends a byte, closes its pipe or dies. Then remove what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while not is_abandoned(name):
        # A forked child of the owner may hold the pipe open for ever, so the owner is checked as well.
        if select.select([0], [], [], 1.0)[0]:
            if os.read(0, 1):
                return
            break
    remove(name, [Path(root) for root in roots], timeout_s=60.0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
