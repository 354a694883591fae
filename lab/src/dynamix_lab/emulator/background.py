"""Background load of emulated hosts, all of it real: busy processes next to the job, and traffic on its link."""

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from dynamix_lab.emulator import traffic
from dynamix_lab.emulator.limits import LEAST_CORES, Limiter, start_helper, stop_helper, tell_helper
from dynamix_lab.emulator.scenario import Load, Scenario

Start = Callable[[int, str, Sequence[str]], "subprocess.Popen[bytes]"]

# One process can use only one core, so a larger host gets several, in one process group.
_SPIN = "import os, sys\nfor _ in range(int(sys.argv[1]) - 1):\n    if not os.fork(): break\nwhile True: pass"


class Noise:
    """A busy process on every host that a disturbance may visit. It is stopped while no disturbance is there.

    It has a control group of its own, and the job's quota is cut by the noise's cores. In one common group the split
    would follow the scheduler's slices, which no schedule could state.

    start   starts a command on a host in a group (host, group, command) and returns it
    """

    def __init__(self, scenario: Scenario, limiter: Limiter, start: Start) -> None:
        self._limiter = limiter
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._busy: set[int] = set()
        for host in noisy_hosts(scenario):
            spinners = math.ceil(max(hosts[host].cpu for _, hosts in scenario.stages()))
            command = [sys.executable, "-I", "-S", "-c", _SPIN, str(spinners)]
            self.processes[host] = start(host, self._group(host), command)
            signal_group(self.processes[host], signal.SIGSTOP)

    def calm(self, cores: Sequence[float]) -> None:
        """Stop hosts' noise that is no longer needed. Call it before `set`: a host never uses more than its cores."""
        for host in sorted(host for host in self._busy if not cores[host]):
            # A duty cycle continues what it stopped, even after our signal, so the group gets almost nothing.
            self._limiter.limit(self._group(host), LEAST_CORES)
            signal_group(self.processes[host], signal.SIGSTOP)
            self._busy.discard(host)

    def set(self, cores: Sequence[float]) -> None:
        """Keep `cores[host]` of every host busy."""
        for host, process in self.processes.items():
            if cores[host]:
                self._limiter.limit(self._group(host), cores[host])
                signal_group(process, signal.SIGCONT)
                self._busy.add(host)

    def close(self) -> None:
        """Kill all of it, without limits, because a throttled process dies slowly."""
        for host, process in self.processes.items():
            self._limiter.limit(self._group(host), None)
            signal_group(process, signal.SIGKILL)
            process.wait()

    def _group(self, host: int) -> str:
        return f"noise{host}"


class Traffic:
    """One helper process that sends and receives on all hosts' links, at the rates that are set."""

    def __init__(self, switch: int, switch_address: str, hosts: Sequence[int], addresses: Sequence[str]) -> None:
        each = [text for pair in zip(map(str, hosts), addresses, strict=True) for text in pair]
        arguments = [str(os.getpid()), str(switch), switch_address, *each]
        self._process = start_helper(traffic.__file__, *arguments, pass_fds=(switch, *hosts))

    def set_rate(self, host: int, mbit_s: float) -> None:
        """Send `mbit_s` in each direction from now on; 0 for nothing."""
        tell_helper(self._process, f"{host} {mbit_s}", "helper that makes background traffic")

    def close(self) -> None:
        stop_helper(self._process)


def noisy_hosts(scenario: Scenario) -> list[int]:
    """The hosts on which a disturbance may take CPU from the job. None with a device: there it changes the speed."""
    if scenario.device is not None:
        return []
    hosts = range(scenario.workers)
    taking = [n.on_hosts(len(hosts)) if isinstance(n, Load) else hosts for n in scenario.disturbances if n.factor < 1]
    return sorted(set().union(*taking))


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process group that `process` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
