"""An emulated cluster: hosts, limits and disturbances around real processes. It removes all of them at its end.

with Emulation("demo", seed=3, run_dir="run") as cluster:
    cluster.launch([sys.executable, "train.py"])
    codes = cluster.wait()
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Literal, NoReturn, get_args

from dynamix.errors import ConfigError, EmulationError, UsageError
from dynamix.probes.host import Cgroups
from dynamix_lab.emulator import awake, control, enter, keeper
from dynamix_lab.emulator.background import Noise, signal_group
from dynamix_lab.emulator.devices import DeviceSteps, SharedDevices
from dynamix_lab.emulator.hosts import Loopback, Namespaces, Network
from dynamix_lab.emulator.limits import Cgroup, DutyCycle, Limiter, find_cgroup, start_helper, stop_helper
from dynamix_lab.emulator.loading import load_scenario
from dynamix_lab.emulator.mechanisms import check_kernel
from dynamix_lab.emulator.scenario import Scenario, check_machine
from dynamix_lab.emulator.schedule import Link, host_links, host_speeds, next_change_s, noise_cores

Mechanism = Literal["auto", "privileged", "duty-cycle"]
_Folder = str | Path | None
_counts = itertools.count()
_POLL_S = 0.02
# A process's history decides whether glibc returns large blocks to the kernel, and taking them again costs a page fault
# per 4 KiB. Then measured policies would differ by their place in the order (docs/design/emulator.md).
_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)}


def load_permitted(scenario: Scenario | Mapping[str, Any] | str | Path, mechanism: str) -> Scenario:
    """`load_scenario`, and all checks that can refuse it before anything is created. Raises as `Emulation`."""
    if mechanism not in get_args(Mechanism):
        raise ConfigError("mechanism", mechanism, ", ".join(get_args(Mechanism)), "use auto")
    loaded = load_scenario(scenario)
    check_machine(loaded, len(os.sched_getaffinity(0)))
    if mechanism == "duty-cycle":
        _check_loopback(loaded)
    else:
        check_kernel(loaded)
    return loaded


def _check_loopback(scenario: Scenario, why: str = "") -> None:
    """Raise `EmulationError` if a scenario shapes links. `why`: the reason that only loopback is available."""
    if needs := ", ".join(scenario.needs.values()):
        fix = "run as root with pyroute2 installed, or remove it from the scenario"
        raise EmulationError(f"the scenario sets {needs}, and on loopback links cannot be shaped{why}: {fix}")


class Emulation:
    """A context manager: the hosts exist inside it, and none of them after it, whatever happened.

    scenario    a `Scenario`, shipped name, YAML file or mapping
    seed        for the disturbances' schedule (`start_clock` may change it)
    run_dir     where ranks' output goes; created if missing
    mechanism   "auto": namespaces and control groups if permitted, else the unprivileged substitute;
                "privileged": those or an error; "duty-cycle": loopback and signals, also as root
    keep_awake  on virtual machines without a quota, work of the lowest priority keeps the processors from idling. It is
                for measurements: on cold processors hosts may be slower, and this varies by the minute

    Links have their limits from the start, CPU limits begin with `throttle`, and disturbances begin with `start_clock`.
    `mechanisms` says which mechanisms are in force.

    Raises `ScenarioError` (bad scenario, more cores than the machine has, or a feature that its kernel lacks) and
    `EmulationError` (the machine refuses, or the scenario shapes links and only loopback is available).
    """

    def __init__(
        self,
        scenario: Scenario | Mapping[str, Any] | str | Path,
        *,
        seed: int = 0,
        run_dir: str | Path,
        mechanism: Mechanism = "auto",
        keep_awake: bool = False,
    ) -> None:
        self.scenario, self.seed, self.run_dir = load_permitted(scenario, mechanism), seed, Path(run_dir)
        self.name = keeper.instance_name(next(_counts))
        self._mechanism, self._keep_awake = mechanism, keep_awake
        self._ranks: list[Popen[bytes]] = []
        self._beside: list[Popen[bytes]] = []  # processes other than ranks
        self._cleanup = contextlib.ExitStack()
        self._lock = threading.RLock()
        self._stop_clock = threading.Event()
        self._clock: threading.Thread | None = None
        self._clock_start: float | None = None
        self._throttled = False
        self._failure: Exception | None = None
        self._devices: SharedDevices | None = None

    def __enter__(self) -> Emulation:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with self._cleanup:
            self._catch_signals()
            found = find_cgroup()
            roots = [] if isinstance(found, str) else [found[0]]
            keeper.sweep(roots)
            helper = start_helper(keeper.__file__, self.name, *map(str, roots))  # cleans up if this process cannot
            self._cleanup.callback(lambda: stop_helper(helper, b"g" if keeper.remove(self.name, roots) else b""))
            self._limiter: Limiter = self._make_limiter(found)
            self._cleanup.callback(self._limiter.close)
            if self._keep_awake and awake.is_virtual() and math.isinf(Cgroups.find().cpu_cores()):
                self._cleanup.callback(stop_helper, start_helper(awake.__file__, str(os.getpid())), b"g")
            self._network: Network = self._make_network()
            self._cleanup.callback(self._network.close)
            self._cleanup.callback(self._kill_all)
            self._noise = Noise(self.scenario, self._limiter, self._start_noise)
            self._cleanup.callback(self._noise.close)
            actions = {"throttle": self.throttle, "unthrottle": self.unthrottle, "start-clock": self.start_clock}
            server = control.ControlServer(keeper.private_folder(self.name), actions)
            self._cleanup.callback(server.close)
            self._control_path = server.path
            if self.scenario.device is not None:
                folder = keeper.private_folder(self.name)
                self._devices = SharedDevices(folder / "devices", self.scenario.workers, self.scenario.device)
            self._cleanup.callback(self._halt_clock)
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    @property
    def mechanisms(self) -> dict[str, str]:
        """The mechanisms in force: network, cpu, link."""
        cpu = self._limiter.mechanism if self._devices is None else "device"
        return {"network": self._network.mechanism, "cpu": cpu, "link": self._network.link}

    def throttle(self) -> None:
        """Put the hosts' CPU limits in force. Disturbances begin only with `start_clock`."""
        with self._lock:
            self._throttled = True
            self._apply()

    def unthrottle(self) -> None:
        """Lift all limits and stop the disturbances."""
        self._halt_clock()
        with self._lock:
            self._throttled, self._clock_start = False, None
            self._apply()

    def start_clock(self, *, seed: int | None = None) -> None:
        """Put limits in force and (re)start the disturbances' schedule at 0 s. `seed` changes the schedule."""
        self._halt_clock()
        with self._lock:
            self.seed = self.seed if seed is None else seed
            self._throttled, self._clock_start, self._failure = True, time.monotonic(), None
            if self._devices is not None:
                self._devices.count_from_now()
            self._apply()
        self._stop_clock.clear()
        self._clock = threading.Thread(target=self._follow_schedule, name="dynamix-clock", daemon=True)
        self._clock.start()

    @property
    def throttled(self) -> bool:
        """Whether limits are in force now."""
        return self._throttled

    def time_s(self) -> float | None:
        """Seconds since `start_clock`; None if the clock is stopped."""
        start = self._clock_start
        return None if start is None else time.monotonic() - start

    def speeds(self) -> list[float] | None:
        """Cores that each host's job may use now; the relative speed of device hosts. None without limits."""
        return self._speeds(self.time_s())

    def _speeds(self, now: float | None) -> list[float] | None:
        if not self._throttled:
            return None
        return [h.cpu for h in self.scenario.hosts] if now is None else host_speeds(self.scenario, now, self.seed)

    def overruns(self) -> list[DeviceSteps]:
        """The device steps of every rank since the last `start_clock`; empty if hosts have no device."""
        return [] if self._devices is None else self._devices.steps()

    def links(self) -> list[Link]:
        """The present state of every host's link."""
        return host_links(self.scenario, self.time_s(), self.seed)

    def address(self, host: int) -> str:
        """The address at which other hosts reach a host; on loopback always 127.0.0.1."""
        return self._network.address(host)

    def plug(self, host: int, *, plugged: bool) -> None:
        """Pull a host's network cable (False) or put it back (True). Raises `EmulationError` on loopback."""
        self._network.plug(host, plugged=plugged)

    def partition(self, *parts: Sequence[int]) -> None:
        """Cut the network: hosts of one part reach only each other. Without parts the network is whole again.

        parts   numbers of hosts; every host in exactly one part

        Raises `ConfigError` for other parts, and `EmulationError` on loopback.
        """
        every = list(range(self.scenario.workers))
        if parts and sorted(host for part in parts for host in part) != every:
            allowed = f"every host from 0 to {every[-1]} once"
            raise ConfigError("parts", [list(part) for part in parts], allowed, "name each host in one part")
        self._network.part(parts or (every,))

    def launch(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: _Folder = None, name: str = ""
    ) -> list[Popen[bytes]]:
        """Start `command` on every host, one rank each, with torchrun's environment. Limits do not change.

        Output goes to `<run_dir>/<name.>rank<r>.out` and `.err`. `env` adds to this process's environment and overrides
        what is set here. Raises `UsageError` while ranks of an earlier launch still run.
        """
        if not command:
            raise ConfigError("command", list(command), "a program and its arguments", "give the command after --")
        if None in self.poll():
            raise UsageError("ranks of the previous launch still run: wait() or terminate() first")
        self._ranks = []
        port = self._free_port()
        for rank in range(self.scenario.workers):
            environment = {**os.environ, **self._environment(rank, port), **(env or {})}
            if self._devices is not None:
                environment |= self._devices.environment(rank, environment)
            stem, fd = f"{name}.rank{rank}" if name else f"rank{rank}", self._network.fd(rank)
            self._ranks.append(self._start(fd, f"host{rank}", command, environment, stem, cwd))
        return list(self._ranks)

    def launch_beside(self, command: Sequence[str], *, name: str = "beside", host: int | None = None) -> Popen[bytes]:
        """Start `command` without a quota, in addition to the ranks. By default it runs between the hosts, at
        `switch_address`, to compute in the network, and has no link of its own. With `host` it is behind its link.

        It ends with the emulation at the latest. Output goes to `<run_dir>/<name>.out` and `.err`.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        fd = self._network.switch()[0] if host is None else self._network.fd(host)
        self._beside.append(self._start(fd, "beside", command, environment, name))
        return self._beside[-1]

    @property
    def switch_address(self) -> str:
        """The address at which hosts reach a process that `launch_beside` started between them."""
        return self._network.switch()[1]

    def poll(self) -> list[int | None]:
        """Exit code of every rank, None while it runs. A negative code is a signal's number, as in subprocess.

        Raises `EmulationError` if the schedule could not be followed, because the run then differs from the scenario.
        """
        if self._failure is not None:
            raise EmulationError(f"the schedule could not be followed: {self._failure}") from self._failure
        return [rank.poll() for rank in self._ranks]

    def wait(self, timeout_s: float | None = None, *, grace_s: float = 75.0) -> list[int]:
        """Wait until every rank has ended, at most `timeout_s`. Returns their exit codes.

        If a rank fails, the others have `grace_s` to end by the timeout of their process group (which must be shorter).
        Then they are terminated. A process that a timeout ends has a negative code.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while None in (codes := self.poll()):
            now = time.monotonic()
            if any(codes) and (deadline is None or deadline > now + grace_s):
                deadline, grace_s = now + grace_s, float("inf")
            if deadline is not None and now >= deadline:
                self.terminate()
                break
            time.sleep(_POLL_S)
        return [rank.wait() for rank in self._ranks]

    def terminate(self, *, patience_s: float = 5.0) -> None:
        """End all ranks and their children: SIGTERM, and SIGKILL after `patience_s`. Lifts the limits."""
        self.unthrottle()  # a rank with a sixth of a core could not end within `patience_s`
        for rank in self._ranks:
            signal_group(rank, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for rank in self._ranks:
            signal_group(rank, signal.SIGKILL)
            rank.wait()

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """The variables that torchrun would set, and those that keep a rank on one thread and in this emulation."""
        return {
            **dict.fromkeys(("RANK", "GROUP_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.scenario.workers)),
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            **{"MASTER_ADDR": self._network.address(0), "MASTER_PORT": str(port)},
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), self._network.interface(rank)),
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            **_HEAP,
            control.VARIABLE: self._control_path,
        }

    def _start(
        self,
        fd: int,
        group: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        stem: str,
        cwd: _Folder = None,
    ) -> Popen[bytes]:
        """Start a process. Output goes to `<run_dir>/<stem>.out` and `.err`, or nowhere without a stem."""
        env, nowhere = {**environment, keeper.MARK: self.name}, Path(os.devnull)
        files = (self.run_dir / f"{stem}.out", self.run_dir / f"{stem}.err") if stem else (nowhere, nowhere)
        with files[0].open("wb") as out, files[1].open("wb") as err, contextlib.ExitStack() as stack:
            go_read, go_write = os.pipe()
            stack.callback(os.close, go_write)
            stack.callback(os.close, go_read)
            line = [sys.executable, "-I", "-S", enter.__file__, str(go_read), str(fd), *command]
            fds = [f for f in (go_read, fd) if f >= 0]
            process = Popen(
                line, stdin=DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True, pass_fds=fds
            )
            with self._lock:
                self._limiter.attach(group, process.pid)
            os.write(go_write, b"g")
        return process

    def _start_noise(self, host: int, group: str, command: Sequence[str]) -> Popen[bytes]:
        environment = {"PATH": os.environ.get("PATH", "")}
        return self._start(self._network.fd(host), group, command, environment, "", "/")

    def _apply(self) -> None:
        now, workers = self.time_s(), self.scenario.workers
        speeds = self._speeds(now)
        noise = [0.0] * workers if now is None else noise_cores(self.scenario, now, self.seed)
        self._noise.calm(noise)
        limits = speeds
        if self._devices is not None:
            self._devices.set_speeds(speeds)
            limits = speeds and [math.inf] * workers
        for rank in range(workers):
            self._limiter.limit(f"host{rank}", limits[rank] if limits else None)
        self._noise.set(noise)
        self._network.set_links(host_links(self.scenario, now, self.seed))

    def _follow_schedule(self) -> None:
        while (now := self.time_s()) is not None:
            change = next_change_s(self.scenario, now)
            if self._stop_clock.wait(None if change is None else max(0.0, change - now)):
                return
            try:
                with self._lock:
                    self._apply()
            except Exception as error:
                self._failure = error
                return

    def _halt_clock(self) -> None:
        self._stop_clock.set()
        if self._clock is not None:
            self._clock.join()
            self._clock = None

    def _make_limiter(self, found: tuple[Path, int] | str) -> Limiter:
        if self._mechanism != "duty-cycle":
            try:
                if isinstance(found, str):
                    raise EmulationError(f"no CPU quotas here: {found}")
                return Cgroup(found[0], found[1], self.name)
            except EmulationError:
                if self._mechanism == "privileged":
                    raise
        return DutyCycle()

    def _make_network(self) -> Network:
        why = ""
        if self._mechanism != "duty-cycle":
            try:
                return Namespaces(self.scenario)
            except EmulationError as error:
                if self._mechanism == "privileged":
                    raise
                why = f" ({error})"
        _check_loopback(self.scenario, why)
        return Loopback()

    def _free_port(self) -> int:
        if self._network.fd(0) >= 0:
            return 29500
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def _kill_all(self) -> None:
        for process in (*self._ranks, *self._beside):
            signal_group(process, signal.SIGKILL)
            process.wait()

    def _catch_signals(self) -> None:
        """Turn SIGTERM and SIGHUP into SystemExit, so that they clean up as Ctrl-C does."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _exit_by_signal)
                self._cleanup.callback(signal.signal, number, signal.SIG_DFL)


def _exit_by_signal(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
