"""`dynamix emulate SCENARIO -- COMMAND`: any training script on emulated hosts, one rank each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from dynamix.errors import ConfigError
from dynamix.events.records import EVENTS_VARIABLE, SCHEMA, read_events
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator.cluster import Emulation, Mechanism, load_permitted
from dynamix_lab.emulator.devices import DeviceSteps, too_many_overruns
from dynamix_lab.emulator.launchers import check_command
from dynamix_lab.emulator.scenario import Scenario

_Ranks = Sequence[subprocess.Popen[bytes]]
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
    env: Mapping[str, str] | None = None,
    described: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run `command` once per host with torchrun's environment, to its end. Returns the contents of result.json.

    The run folder then has run.json, result.json, the ranks' output under ranks/SEED/ and, if the job makes a
    `Controller`, events.jsonl.

    throttle_after_s   seconds after which limits and disturbances begin. None: when the job asks for it
                       (`dynamix_lab.emulator.control`), or once every rank is connected to another, which means that
                       the process group exists; at the latest 120 s after the start
    timeout_s          ends the job after this time; None for no limit
    grace_s            time that other ranks have to end after one has failed
    echo               where rank 0's output is copied while it runs, in addition to its file
    env                added to the ranks' environment
    described          further facts for run.json and result.json

    `exit_code` is the worst rank's (128 + n for signal n). Ctrl-C ends the ranks, removes the hosts and is re-raised.
    """
    check_command(command)
    if throttle_after_s is not None and not 0 <= throttle_after_s < float("inf"):
        raise ConfigError("throttle_after_s", throttle_after_s, "0 or more", "use 0 to limit ranks from birth")
    loaded = load_permitted(scenario, mechanism)  # fails before a folder is created
    with RunFolder("emulate", out) as folder:
        ranks = folder.path / "ranks" / str(seed)
        with Emulation(loaded, seed=seed, run_dir=ranks, mechanism=mechanism) as cluster:
            facts = _facts(loaded, cluster, command, seed) | dict(described or {})
            folder.write_run(**facts)
            events = (folder.path / "events.jsonl").resolve()
            began = time.monotonic()
            end_s = math.inf if timeout_s is None else began + timeout_s
            launch = functools.partial(cluster.launch, command, env={EVENTS_VARIABLE: str(events), **(env or {})})
            limited_after_s, late = _run(cluster, launch, _Echo(ranks, echo), throttle_after_s, end_s, grace_s)
            codes = [code if code is not None else 1 for code in cluster.poll()]
            steps = [dataclasses.asdict(rank) for rank in cluster.overruns()]
            wall_s = round(time.monotonic() - began, 3)
    result = {**facts, "exit_code": worst(codes), "exit_codes": codes, "folder": str(folder.path)}
    result |= {"wall_s": wall_s, "limited_after_s": limited_after_s, "device_steps": steps or None}
    result["ended_by_timeout_s"] = timeout_s if late else None
    folder.write_result(result)
    if echo is not None:
        _show_failures(codes, ranks, echo)
    return result


def summary(result: Mapping[str, Any]) -> str:
    """One line about a finished emulation: exit codes, seconds, and the contents of its folder."""
    folder, codes, limits = Path(result["folder"]), result["exit_codes"], result["limited_after_s"]
    alike = len(set(codes)) == 1
    ended = f"{len(codes)} ranks ended with {codes[0]}" if alike else f"ranks ended with {', '.join(map(str, codes))}"
    limited = "without limits" if limits is None else f"limits from {limits:.1f} s on"
    if (timeout_s := result["ended_by_timeout_s"]) is not None:
        limited = f"ended by --timeout {timeout_s:g}, {limited}"
    holds = ["run.json", "result.json"]
    events = folder / "events.jsonl"
    if events.exists():
        holds.append(f"events.jsonl ({len(read_events(events))} windows)")
    holds += ["report.html"] if (folder / "report.html").exists() else []
    holds.append(f"ranks/{result['seeds'][0]}/ (output of every rank)")
    took = f"after {result['wall_s']:.1f} s (with the start of the processes)"
    return f"{ended} {took}, {limited}{_devices(result)}; {folder} holds {', '.join(holds)}"


def _devices(result: Mapping[str, Any]) -> str:
    """Whether devices were paced and on time; empty if hosts have none."""
    ranks = [DeviceSteps(**steps) for steps in result.get("device_steps") or ()]
    if not ranks or result["limited_after_s"] is None:
        return ""
    if idle := [str(rank) for rank, steps in enumerate(ranks) if not steps.steps]:
        why = "it trains no torch.nn.Module then, or its Python has -I, -E or -S"
        return f"; NO DEVICE STEPS on rank {', '.join(idle)} ({why})"
    most = max(rank.overruns / rank.steps for rank in ranks)
    said = f"; {sum(rank.steps for rank in ranks)} device steps, on a rank at most {most:.1%} overran"
    return f"{said} (TOO MANY: this machine is too slow or too busy)" if too_many_overruns(ranks) else said


def _facts(scenario: Scenario, cluster: Emulation, command: Sequence[str], seed: int) -> dict[str, Any]:
    """The facts that run.json and result.json have in common."""
    described = scenario.model_dump(mode="json")
    return {
        **{"schema": SCHEMA, "command": "emulate", "job": list(command), "cluster": "emulator"},
        **{"mechanisms": cluster.mechanisms, "scenario": scenario.name, "scenario_sha256": scenario.sha256},
        **{"hosts": described["hosts"], "device": described["device"], "seeds": [seed]},
    }


def worst(codes: Sequence[int]) -> int:
    """One exit code for many ranks: the largest. Signal n counts as 128 + n, as in a shell.

    >>> worst([0, 1, -9])
    137
    """
    return max((128 - code if code < 0 else code for code in codes), default=0)


def _run(
    cluster: Emulation, launch: Callable[[], _Ranks], follow: _Echo, after_s: float | None, end_s: float, grace_s: float
) -> tuple[float | None, bool]:
    """Run to the end of the job. Returns after how many seconds limits began (None if it ended before), and whether
    the time at `end_s` ended it."""
    limited_after_s = 0.0 if after_s == 0 else None
    if limited_after_s is not None:
        cluster.start_clock()
    began = time.monotonic()
    with contextlib.closing(follow):
        try:
            ranks = launch()
            follow.open()
            while None in (codes := cluster.poll()) and not any(codes) and (now := time.monotonic()) < end_s:
                if limited_after_s is None:
                    limited_after_s = _limited(cluster, ranks, now - began, after_s)
                follow.more()
                time.sleep(0.1)
            cluster.wait(max(0.0, end_s - time.monotonic()), grace_s=grace_s)
            late = None in codes and time.monotonic() >= end_s
        except KeyboardInterrupt:
            cluster.terminate(patience_s=2.0)
            raise
    return limited_after_s, late


def _limited(cluster: Emulation, ranks: _Ranks, elapsed_s: float, after_s: float | None) -> float | None:
    """Start limits if they are due. Returns `elapsed_s` once they are in force."""
    due = elapsed_s >= (LATEST_START_S if after_s is None else after_s)
    if not cluster.throttled and (due or (after_s is None and _connected(cluster, ranks))):
        cluster.start_clock()
    return round(elapsed_s, 3) if cluster.throttled else None


def _connected(cluster: Emulation, ranks: _Ranks) -> bool:
    own_hosts = cluster.mechanisms["network"] != "loopback"
    return len(ranks) > 1 and all(is_connected(rank.pid, own_host=own_hosts) for rank in ranks)


def is_connected(pid: int, *, own_host: bool) -> bool:
    """Whether process `pid` has an established TCP connection; with `own_host`, whether any process of its host has."""
    sockets = set()
    with contextlib.suppress(OSError):
        if own_host and os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return False  # does not exist yet
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
    """Copies rank 0's output while it is written."""

    def __init__(self, folder: Path, to: TextIO | None) -> None:
        self._folder, self._to = folder, to
        self._files: list[BinaryIO] = []

    def open(self) -> None:
        """Begin to follow once the files exist."""
        if self._to is not None:
            self._files = [(self._folder / name).open("rb") for name in ("rank0.out", "rank0.err")]

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
    """Print which ranks failed, and their last output, once for ranks that failed alike."""
    alike: dict[tuple[int, str], list[int]] = {}
    ends: dict[int, list[str]] = {}
    for rank, code in enumerate(codes):
        if code:
            ends[rank] = (folder / f"rank{rank}.err").read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            last = re.sub(r"\brank ?\d+\b", "", ends[rank][-1]) if ends[rank] else ""
            alike.setdefault((code, last), []).append(rank)
    for (code, _), ranks in alike.items():
        whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        if ranks[0] == 0:  # its output has already been copied
            to.write(f"{whose} ended with {code}; their output is in {folder}\n")
            continue
        to.write(f"{whose} ended with {code}; the end of {folder / f'rank{ranks[0]}.err'}:\n")
        to.writelines(f"  {line}\n" for line in ends[ranks[0]])
    to.flush()
