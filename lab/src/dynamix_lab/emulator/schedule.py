"""The exact course of a scenario over time, without emulating it: what every host's job has, and when it changes.

The emulation applies these numbers, and a reference policy may read them. All random draws are a hash of (seed,
disturbance, slot), so that no library's generator can change a frozen scenario.
"""

import bisect
import hashlib
from dataclasses import dataclass
from functools import lru_cache

from dynamix_lab.emulator.scenario import Host, Load, Scenario, Trace

_EARLY_S = 1e-6  # changes begin this early, or rounding could put a change's time before the change


@dataclass(frozen=True, slots=True)
class Link:
    """State of one host's link.

    up_mbit_s, down_mbit_s   the most that it sends and receives; None for no limit
    loss                     fraction of packets lost, in each direction
    latency_ms               added to every packet, in each direction
    background_mbit_s        part of the rates that other traffic uses
    """

    up_mbit_s: float | None = None
    down_mbit_s: float | None = None
    loss: float = 0.0
    latency_ms: float = 0.0
    background_mbit_s: float = 0.0


def host_speeds(scenario: Scenario, t_s: float, seed: int = 0) -> list[float]:
    """Cores that each host's job has `t_s` seconds after the clock's start: exact, and depends only on the arguments.

    For hosts with a device, the relative speed.

    >>> from dynamix_lab.emulator import load_scenario
    >>> host_speeds(load_scenario("even"), 3.0)
    [0.35, 0.35, 0.35, 0.35]
    >>> demo = load_scenario("demo")
    >>> sum(now < host.cpu for now, host in zip(host_speeds(demo, 16.0, seed=3), demo.hosts))
    1
    """
    speeds = _disturbed(scenario, [host.cpu for host in _hosts(scenario, t_s)], t_s, seed)
    return [s * f for s, f in zip(speeds, _factors(scenario, t_s, "cpu"), strict=True)]


def noise_cores(scenario: Scenario, t_s: float, seed: int = 0) -> list[float]:
    """Cores that disturbances use on each host at `t_s`; with `host_speeds` they sum to the host's present cores."""
    whole = [h.cpu * f for h, f in zip(_hosts(scenario, t_s), _factors(scenario, t_s, "cpu"), strict=True)]
    left = _disturbed(scenario, whole, t_s, seed)
    return [a - b for a, b in zip(whole, left, strict=True)]


def _disturbed(scenario: Scenario, cores: list[float], t_s: float, seed: int) -> list[float]:
    left = list(cores)
    for d, noise in enumerate(scenario.disturbances):
        for host in disturbed_hosts(scenario, d, t_s, seed):
            left[host] *= noise.factor
    return left


def host_links(scenario: Scenario, t_s: float | None, seed: int = 0) -> list[Link]:
    """State of every host's link `t_s` seconds after the clock's start; None: before it, without any disturbance.

    >>> from dynamix_lab.emulator import load_scenario
    >>> [link.up_mbit_s for link in host_links(load_scenario("slow-link"), 0.0)]
    [None, None, None, 40.0]
    """
    if t_s is None:
        return [Link(host.up_mbit_s, host.down_mbit_s, host.loss, host.latency_ms) for host in scenario.hosts]
    traffic = [0.0] * scenario.workers
    for d, noise in enumerate(scenario.disturbances):
        if isinstance(noise, Load) and noise.traffic_mbit_s:
            for host in disturbed_hosts(scenario, d, t_s, seed):
                traffic[host] += noise.traffic_mbit_s
    scales = _factors(scenario, t_s, "rate")
    return [
        Link(_times(host.up_mbit_s, f), _times(host.down_mbit_s, f), host.loss, host.latency_ms, extra)
        for host, f, extra in zip(_hosts(scenario, t_s), scales, traffic, strict=True)
    ]


def disturbed_hosts(scenario: Scenario, disturbance: int, t_s: float, seed: int = 0) -> tuple[int, ...]:
    """The hosts on which disturbance number `disturbance` is at `t_s` (0 or more)."""
    noise = scenario.disturbances[disturbance]
    key = f"{seed}/{disturbance}/{noise.seed}"
    t_s += _EARLY_S
    slot = int(t_s // noise.every_s)
    if not isinstance(noise, Load):
        return (_visits(scenario.workers, key, slot),)
    if t_s < noise.start_s or (noise.end_s is not None and t_s >= noise.end_s):
        return ()
    hosts, least = noise.on_hosts(scenario.workers), noise.probability * 2**64
    return hosts if noise.probability == 1 else tuple(h for h in hosts if _draw(f"{key}/{h}/{slot}") < least)


def next_change_s(scenario: Scenario, t_s: float) -> float | None:
    """The first time after `t_s` at which anything may change; None if nothing changes any more."""
    times = [change.at_s for change in scenario.schedule]
    for noise in scenario.disturbances:
        if isinstance(noise, Load):
            times += [noise.start_s] if noise.end_s is None else [noise.start_s, noise.end_s]
            if noise.probability == 1 or (noise.end_s is not None and t_s >= noise.end_s):
                continue
        times.append(((t_s + _EARLY_S) // noise.every_s + 1) * noise.every_s)
    if scenario.trace is not None:
        times += _trace_times(scenario.trace, t_s)
    return min((time for time in times if time > t_s), default=None)


def _hosts(scenario: Scenario, t_s: float) -> list[Host]:
    now = list(scenario.hosts)
    for at_s, hosts in scenario.stages():
        if at_s > t_s + _EARLY_S:
            break
        now = hosts
    return now


def _factors(scenario: Scenario, t_s: float, what: str) -> tuple[float, ...]:
    trace = scenario.trace
    if trace is None or trace.scales != what:
        return (1.0,) * scenario.workers
    return trace.factors[bisect.bisect_right(trace.times_s, _phase(trace, t_s)[1]) - 1]


def _phase(trace: Trace, t_s: float) -> tuple[int, float]:
    """(repetition, seconds into it)."""
    t_s += _EARLY_S
    turn = 0 if trace.repeat_s is None else int(t_s // trace.repeat_s)
    return turn, max(0.0, t_s - turn * (trace.repeat_s or 0.0))


def _trace_times(trace: Trace, t_s: float) -> list[float]:
    turn, into = _phase(trace, t_s)
    start = turn * (trace.repeat_s or 0.0)
    row = bisect.bisect_right(trace.times_s, into)
    if row < len(trace.times_s):
        return [start + trace.times_s[row]]
    return [] if trace.repeat_s is None else [start + trace.repeat_s]


def _times(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor


@lru_cache(maxsize=4096)
def _visits(hosts: int, key: str, visit: int) -> int:
    host = _draw(f"{key}/0") % hosts
    if hosts > 1:
        for n in range(1, visit + 1):
            host = (host + 1 + _draw(f"{key}/{n}") % (hosts - 1)) % hosts
    return host


def _draw(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
