"""`dynamix emulate SCENARIO -- COMMAND`: anybody's training script on emulated hosts, one rank each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from dynamix.emulator.cluster import Emulation, Mechanism
from dynamix.emulator.loading import load_scenario
from dynamix.emulator.mechanisms import check_kernel
from dynamix.emulator.scenario import Scenario, check_machine
from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder

LATEST_START_S = 120.0
_TAIL_LINES = 15


def emulate(
    scenario: Scenario | Mapping[str, Any] | str | Path,
    command: Sequence[str],
    *,
    seed: int = 0,
    out: str | Path | None = None,
    throttle_after_s: float | None = None,
    timeout_s: float | None = None,
    grace_s: float = 75.0,
    mechanism: Mechanism = "auto",
    echo: TextIO | None = sys.stderr,
) -> dict[str, Any]:
    """Runs `command` once per host with torchrun's environment, to its end; returns what result.json holds.

    throttle_after_s   seconds after which limits and disturbances begin. None: when the job asks for it
                       (`dynamix.emulator.control`), or as soon as every rank holds a connection to another, that is
                       once the process group is up; 120 s after the start in any case
    timeout_s          ends the job then; None for no limit
    grace_s            what other ranks get to end by themselves after one has failed
    echo               where rank 0's output goes while it runs, besides its file

    `exit_code` is the worst rank's (128 + n for signal n). Ctrl-C ends the ranks, removes the hosts and is raised on.
    """
    if not command:
        raise ConfigError("command", "", "a program and its arguments", "dynamix emulate demo -- python train.py")
    if throttle_after_s is not None and not 0 <= throttle_after_s < float("inf"):
        raise ConfigError("throttle_after_s", throttle_after_s, "0 or more", "use 0 to limit ranks from birth")
    if mechanism not in ("auto", "privileged", "duty-cycle"):
        raise ConfigError("mechanism", mechanism, "auto, privileged, duty-cycle", "use auto")
    loaded = load_scenario(scenario)
    check_machine(loaded, len(os.sched_getaffinity(0)))
    if mechanism != "duty-cycle":
        check_kernel(loaded)
    with (
        RunFolder("emulate", out) as folder,
        Emulation(loaded, seed=seed, run_dir=folder.path, mechanism=mechanism) as cluster,
    ):
        facts = {
            "schema": 1, "command": "emulate", "job": list(command), "cluster": "emulator",
            "mechanisms": cluster.mechanisms, "scenario": loaded.name, "scenario_sha256": loaded.sha256,
            "hosts": loaded.model_dump(mode="json")["hosts"], "seeds": [seed],
        }  # fmt: skip
        folder.write_run(**facts)
        began = time.monotonic()
        limited_after_s = _run(cluster, command, throttle_after_s, timeout_s, grace_s, folder.path, echo)
        codes = [code if code is not None else 1 for code in cluster.poll()]
        result = {
            **facts, "exit_code": worst(codes), "exit_codes": codes, "folder": str(folder.path),
            "wall_s": round(time.monotonic() - began, 3), "limited_after_s": limited_after_s,
        }  # fmt: skip
    folder.write_result(result)
    if echo is not None:
        _show_failures(codes, folder.path, echo)
    return result


def worst(codes: Sequence[int]) -> int:
    """One exit code for many ranks: the largest, a signal n counting as 128 + n as in a shell.

    >>> worst([0, 1, -9])
    137
    """
    return max((128 - code if code < 0 else code for code in codes), default=0)


def _run(
    cluster: Emulation, command: Sequence[str], throttle_after_s: float | None, timeout_s: float | None,
    grace_s: float, folder: Path, echo: TextIO | None,
) -> float | None:  # fmt: skip
    """To the end of the job; returns after how many seconds limits began, None if it ended before."""
    if throttle_after_s == 0:
        cluster.start_clock()
    began = time.monotonic()
    limited_after_s = 0.0 if throttle_after_s == 0 else None
    deadline = None if timeout_s is None else began + timeout_s
    with contextlib.ExitStack() as stack:
        try:
            ranks = cluster.launch(command)
            follow = _Echo(folder, echo)
            stack.callback(follow.close)
            while None in (codes := cluster.poll()) and not any(codes):
                now = time.monotonic()
                if deadline is not None and now > deadline:
                    cluster.terminate()
                    break
                if limited_after_s is None:
                    if not cluster.throttled and _is_due(now - began, throttle_after_s, ranks, cluster):
                        cluster.start_clock()
                    limited_after_s = round(now - began, 3) if cluster.throttled else None
                follow.more()
                time.sleep(0.1)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            cluster.wait(left, grace_s=grace_s)
        except KeyboardInterrupt:
            cluster.terminate(patience_s=2.0)
            raise
    return limited_after_s


def _is_due(
    elapsed_s: float, after_s: float | None, ranks: Sequence[subprocess.Popen[bytes]], cluster: Emulation
) -> bool:
    if after_s is not None:
        return elapsed_s >= after_s
    if elapsed_s >= LATEST_START_S:
        return True
    own_hosts = cluster.mechanisms["network"] != "loopback"
    return len(ranks) > 1 and all(is_connected(rank.pid, own_host=own_hosts) for rank in ranks)


def is_connected(pid: int, *, own_host: bool) -> bool:
    """Whether process `pid` holds an established TCP connection; with `own_host`, whether anything on its host does."""
    sockets = set()
    with contextlib.suppress(OSError):
        if own_host and os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return False  # not there yet
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "01":
                    sockets.add(f"socket:[{fields[9]}]")
        if own_host:
            return bool(sockets)
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd) in sockets:
                    return True
    return False


class _Echo:
    """Copies what rank 0 writes, as it comes."""

    def __init__(self, folder: Path, to: TextIO | None) -> None:
        self._to = to
        self._files = [(folder / name).open("rb") for name in ("rank0.out", "rank0.err")] if to is not None else []

    def more(self) -> None:
        for file in self._files:
            text = file.read().decode(errors="replace")
            if text and self._to is not None:
                self._to.write(text)
                self._to.flush()

    def close(self) -> None:
        self.more()
        for file in self._files:
            file.close()


def _show_failures(codes: Sequence[int], folder: Path, to: TextIO) -> None:
    for rank, code in enumerate(codes):
        if code:
            to.write(f"rank {rank} ended with {code}; the end of {folder / f'rank{rank}.err'}:\n")
            lines = (folder / f"rank{rank}.err").read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            to.writelines(f"  {line}\n" for line in lines if rank)  # rank 0's has been shown
    to.flush()
