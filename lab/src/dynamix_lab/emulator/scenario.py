"""An emulated cluster and its disturbances, as data. The module `schedule` computes its course over time."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dynamix.errors import ScenarioError
from dynamix_lab.emulator.traces import MAX_ROWS, check_rows

MAX_HOSTS = 64
MOST_TRAFFIC = 0.9  # of a link's rate; with more, the job's traffic would nearly stop

_Cores = Annotated[float, Field(strict=True, ge=0.02, le=1024, allow_inf_nan=False)]
_Rate = Annotated[float, Field(strict=True, ge=0.1, le=30_000, allow_inf_nan=False)]
_Loss = Annotated[float, Field(strict=True, ge=0, le=0.5, allow_inf_nan=False)]
_Latency = Annotated[float, Field(strict=True, ge=0, le=10_000, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(strict=True, ge=0.5, le=86_400, allow_inf_nan=False)]
_Time = Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)]
_Factor = Annotated[float, Field(strict=True, ge=0.05, le=0.95, allow_inf_nan=False)]
_Part = Annotated[float, Field(strict=True, ge=0.05, le=1, allow_inf_nan=False)]
_Traffic = Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)]
_Chance = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
_Seed = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
_Work = Annotated[float, Field(strict=True, ge=0, le=60_000, allow_inf_nan=False)]
_Fixed = Annotated[float, Field(strict=True, gt=0, le=60_000, allow_inf_nan=False)]
_Index = Annotated[int, Field(strict=True, ge=0, lt=MAX_HOSTS)]

# The first version hashed all its fields, which are these. A later field counts only if it differs from its default,
# so that a scenario without it keeps its hash.
_ALWAYS_HASHED = {"hosts", "cpu", "rate_mbit_s", "disturbances", "kind", "every_s", "factor", "seed"}
_NEVER_HASHED = {"name", "description", "file"}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Host(_Model):
    """One emulated host and its link.

    cpu                cores that its job may use, 0.5 is half a core; with a `Device`: its relative speed
    rate_mbit_s        rate of its link, in each direction; None: no limit
    rate_up_mbit_s     rate at which it sends, if that differs
    rate_down_mbit_s   rate at which it receives, if that differs
    loss               part of its packets that get lost, in each direction
    latency_ms         time that is added to every packet, in each direction
    """

    cpu: _Cores
    rate_mbit_s: _Rate | None = None
    rate_up_mbit_s: _Rate | None = None
    rate_down_mbit_s: _Rate | None = None
    loss: _Loss = 0.0
    latency_ms: _Latency = 0.0

    @property
    def up_mbit_s(self) -> float | None:
        """The most that the host sends; None for no limit."""
        return self.rate_mbit_s if self.rate_up_mbit_s is None else self.rate_up_mbit_s

    @property
    def down_mbit_s(self) -> float | None:
        """The most that the host receives; None for no limit."""
        return self.rate_mbit_s if self.rate_down_mbit_s is None else self.rate_down_mbit_s


class Neighbour(_Model):
    """Another tenant, on one host at a time. It leaves `factor` of that host's cores to the job.

    Every `every_s` seconds it moves to another host, drawn at random. Neighbours of one scenario with different values
    of `seed` move differently; the draw also depends on the emulation's seed.
    """

    kind: Literal["neighbour"]
    every_s: _Seconds
    factor: _Factor
    seed: _Seed = 0


class Load(_Model):
    """Background load on given hosts: a real busy process, real traffic on the link, or both.

    hosts           their numbers; None: all
    factor          part of the host's cores that it leaves to the job; 1: no busy process
    traffic_mbit_s  UDP that it sends, and that it receives, over the host's link
    start_s, end_s  when it begins and ends; None: it does not end
    probability     chance that it runs in a slot of `every_s` seconds, drawn for every slot and host; 1: it always runs
    seed            loads with different seeds are drawn differently; the draw also depends on the emulation's seed
    """

    kind: Literal["load"]
    hosts: Annotated[tuple[_Index, ...], Field(min_length=1, max_length=MAX_HOSTS)] | None = None
    factor: _Part = 1.0
    traffic_mbit_s: _Traffic = 0.0
    start_s: _Time = 0.0
    end_s: _Time | None = None
    probability: _Chance = 1.0
    every_s: _Seconds = 10.0
    seed: _Seed = 0

    def on_hosts(self, workers: int) -> tuple[int, ...]:
        """The hosts on which the load may run."""
        return tuple(range(workers)) if self.hosts is None else self.hosts


_Disturbance = Annotated[Neighbour | Load, Field(discriminator="kind")]


class Change(_Model):
    """A change of a host, or of all if `host` is None, from `at_s` seconds on. Values that are None do not change."""

    at_s: _Time
    host: _Index | None = None
    cpu: _Cores | None = None
    rate_mbit_s: _Rate | None = None
    rate_up_mbit_s: _Rate | None = None
    rate_down_mbit_s: _Rate | None = None
    loss: _Loss | None = None
    latency_ms: _Latency | None = None

    def applied(self, host: Host) -> Host:
        """`host` after this change."""
        new = {n: v for n in Host.model_fields if (v := getattr(self, n)) is not None}
        if "rate_mbit_s" in new:  # sets both directions, and overrides their own rates
            new = {"rate_up_mbit_s": None, "rate_down_mbit_s": None, **new}
        return host.model_copy(update=new)


class Trace(_Model):
    """A recorded slowdown: the cores of host i, or the rates of its link, are multiplied by its factor at that time.

    file      CSV of time_s and a factor per host (`dynamix_lab.emulator.traces`), relative to the scenario's file;
              `load_scenario` reads it into the two fields below
    times_s   time from which a row applies; the first is 0
    factors   rows with a factor for each host, 0.05 to 1
    scales    what is multiplied, "cpu" or "rate"
    repeat_s  the trace begins again after so many seconds; None: the last row applies to the end
    """

    file: Annotated[str, Field(strict=True)] | None = None
    scales: Literal["cpu", "rate"] = "cpu"
    repeat_s: _Seconds | None = None
    times_s: Annotated[tuple[float, ...], Field(max_length=MAX_ROWS)] = ()
    factors: Annotated[tuple[tuple[float, ...], ...], Field(max_length=MAX_ROWS)] = ()

    @model_validator(mode="after")
    def _check(self) -> Trace:
        check_rows(self.times_s, self.factors)
        if self.repeat_s is not None and self.repeat_s <= self.times_s[-1]:
            allowed = f"more than {self.times_s[-1]:g}, its last time"
            raise ScenarioError("trace.repeat_s", self.repeat_s, allowed, "repeat later, or shorten the trace")
        return self


class Device(_Model):
    """An accelerator that every host of the scenario has, and the time of a training step on it at relative speed 1.

    fixed_ms       time of every forward and backward pass
    per_sample_ms  time of each sample
    per_cost_ms    time of each unit of the batch's cost, e.g. a token (`dynamix_lab.emulator.devices.batch_cost`)
    """

    fixed_ms: _Fixed
    per_sample_ms: _Work
    per_cost_ms: _Work = 0.0


class Scenario(_Model):
    """Hosts and what disturbs them. Make one with `load_scenario`: its errors name the value and the fix.

    hosts          one rank each
    disturbances   neighbours and loads; if several are on a host, they apply in this order
    schedule       changes, sorted by time; time counts from the start of the clock
    trace          a recorded slowdown, in addition
    device         every host computes on such a device: `cpu` is its relative speed, in (0, 1], and limits no process
    """

    name: Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)] = "unnamed"
    description: Annotated[str, Field(strict=True)] = ""
    hosts: Annotated[tuple[Host, ...], Field(min_length=1, max_length=MAX_HOSTS)]
    disturbances: Annotated[tuple[_Disturbance, ...], Field(max_length=8)] = ()
    schedule: Annotated[tuple[Change, ...], Field(max_length=1000)] = ()
    trace: Trace | None = None
    device: Device | None = None

    @property
    def workers(self) -> int:
        """W: one rank per host."""
        return len(self.hosts)

    @property
    def total_cores(self) -> float:
        """The largest sum of all hosts' cores (of device hosts: relative speed) at any time, including noise."""
        return max(sum(host.cpu for host in hosts) for _, hosts in self.stages())

    @property
    def needs(self) -> dict[str, str]:
        """Its demands on links ("rate", "loss", "latency", "traffic"), each with the first setting that makes it."""
        found: dict[str, str] = {}
        places: list[tuple[str, Host | Change]] = [(f"hosts[{i}]", host) for i, host in enumerate(self.hosts)]
        places += [(f"schedule[{i}]", change) for i, change in enumerate(self.schedule)]
        for place, part in places:
            for name in ("rate_mbit_s", "rate_up_mbit_s", "rate_down_mbit_s", "loss", "latency_ms"):
                if value := getattr(part, name):
                    found.setdefault(name.partition("_")[0], f"{place}.{name}={value:g}")
        for d, load in self._loads():
            if load.traffic_mbit_s:
                found.setdefault("traffic", f"disturbances[{d}].traffic_mbit_s={load.traffic_mbit_s:g}")
        return found

    @property
    def sha256(self) -> str:
        """Hash of the content. It ignores names, the description, a trace's file name and the order of keys."""
        canonical = json.dumps(_hashed(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def stages(self) -> Iterator[tuple[float, list[Host]]]:
        """Yields (time, hosts from then) at 0 s and at every time of the schedule, without trace and disturbances."""
        hosts = list(self.hosts)
        yield 0.0, list(hosts)
        for at_s, changes in itertools.groupby(self.schedule, key=lambda change: change.at_s):
            for change in changes:
                for i in range(self.workers) if change.host is None else (change.host,):
                    hosts[i] = change.applied(hosts[i])
            yield at_s, list(hosts)

    @model_validator(mode="after")
    def _check(self) -> Scenario:
        for d, load in self._loads():
            place = f"disturbances[{d}]"
            self._check_hosts(f"{place}.hosts", load.on_hosts(self.workers))
            if load.end_s is not None and load.end_s <= load.start_s:
                allowed = f"more than start_s, {load.start_s:g}"
                raise ScenarioError(f"{place}.end_s", load.end_s, allowed, "end it later")
            if load.factor == 1 and not load.traffic_mbit_s:
                allowed = "less than 1, or with traffic_mbit_s"
                raise ScenarioError(f"{place}.factor", load.factor, allowed, "say what the load is")
        before = 0.0
        for i, change in enumerate(self.schedule):
            self._check_hosts(f"schedule[{i}].host", () if change.host is None else (change.host,))
            if change.at_s < before:
                allowed = f"{before:g} or more, as the change before"
                raise ScenarioError(f"schedule[{i}].at_s", change.at_s, allowed, "sort the schedule by time")
            before = change.at_s
        if self.trace is not None and len(self.trace.factors[0]) != self.workers:
            found = f"{len(self.trace.factors[0])} factors a row"
            raise ScenarioError("trace", found, f"{self.workers}, one per host", "give every host a column")
        self._check_links()
        if self.device is not None:
            self._check_speeds()
        return self

    def _check_speeds(self) -> None:
        """Check the `cpu` of device hosts: it is a relative speed."""
        wrong = [(place, cpu) for place, cpu in self.cpus() if cpu > 1]
        for place, cpu in wrong[:1]:
            allowed = "at most 1: with device, cpu is a relative speed, 1 that of the device"
            fix = f"divide every cpu by {max(cpu for _, cpu in wrong):g}, or remove device"
            raise ScenarioError(place, cpu, allowed, fix)

    def cpus(self) -> list[tuple[str, float]]:
        """Every value of `cpu`, with the name of its setting."""
        found = [(f"hosts[{i}].cpu", host.cpu) for i, host in enumerate(self.hosts)]
        return found + [(f"schedule[{i}].cpu", change.cpu) for i, change in enumerate(self.schedule) if change.cpu]

    def _check_links(self) -> None:
        """Check that every traced rate is set, and that background traffic leaves the job a part of its link."""
        least, traced = [1.0] * self.workers, self.trace is not None and self.trace.scales == "rate"
        if self.trace is not None and traced:
            least = [min(column) for column in zip(*self.trace.factors, strict=True)]
        traffic = [0.0] * self.workers
        for _, load in self._loads():
            for i in load.on_hosts(self.workers):
                traffic[i] += load.traffic_mbit_s
        for _, hosts in self.stages():
            for i, host in enumerate(hosts):
                rates = [rate for rate in (host.up_mbit_s, host.down_mbit_s) if rate is not None]
                if traced and len(rates) < 2:
                    allowed = "a rate in each direction, which the trace scales"
                    raise ScenarioError(f"hosts[{i}].rate_mbit_s", None, allowed, "set rate_mbit_s for every host")
                if rates and traffic[i] > (most := MOST_TRAFFIC * min(rates) * least[i]):
                    allowed = f"at most {most:g}, {MOST_TRAFFIC} of its slowest rate"
                    fix = "lower the traffic or raise the rate"
                    raise ScenarioError(f"traffic_mbit_s on hosts[{i}]", traffic[i], allowed, fix)

    def _check_hosts(self, name: str, hosts: tuple[int, ...]) -> None:
        if any(host >= self.workers for host in hosts):
            raise ScenarioError(name, max(hosts), f"0 to {self.workers - 1}", "name a host of the scenario")

    def _loads(self) -> list[tuple[int, Load]]:
        return [(d, noise) for d, noise in enumerate(self.disturbances) if isinstance(noise, Load)]


def check_machine(scenario: Scenario, cores: float) -> None:
    """Raise `ScenarioError` if this machine has fewer cores than the scenario's hosts need together.

    Device hosts need none: their `cpu` is a relative speed.
    """
    if scenario.device is not None:
        return
    allowed = f"at most {cores:g}, the cores of this machine"
    for name, cpu in scenario.cpus():
        if cpu > cores:
            raise ScenarioError(name, cpu, allowed, "lower it, or use a larger machine")
    if scenario.total_cores > cores + 1e-9:
        fix = f"multiply every cpu by {0.9 * cores / scenario.total_cores:.2f}, or use fewer hosts"
        raise ScenarioError("sum of hosts' cpu", round(scenario.total_cores, 4), allowed, fix)


def _hashed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_hashed(v) for v in value]
    if not isinstance(value, BaseModel):
        return value
    parts = [(name, getattr(value, name), field.default) for name, field in type(value).model_fields.items()]
    counted = [(n, v) for n, v, default in parts if n not in _NEVER_HASHED and (v != default or n in _ALWAYS_HASHED)]
    return {name: _hashed(part) for name, part in counted}
