"""What an emulated cluster looks like and how it changes: the scenario, its file, and its exact schedule.

A scenario is data. `host_speeds` says, without emulating anything, how many cores every host's job has at any time;
the emulation applies the same numbers, and a reference policy may read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamix.errors import ScenarioError

MAX_HOSTS = 64
MIN_CORES = 0.02

_Cores = Annotated[float, Field(strict=True, ge=MIN_CORES, le=1024, allow_inf_nan=False)]
_Rate = Annotated[float, Field(strict=True, ge=0.1, le=100_000, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(strict=True, ge=0.5, le=86_400, allow_inf_nan=False)]
_Factor = Annotated[float, Field(strict=True, ge=0.05, le=0.95, allow_inf_nan=False)]
_Seed = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Host(_Model):
    """One emulated host.

    cpu           cores its job may use; a fraction is a share of one core
    rate_mbit_s   its link, in each direction; None for no limit
    """

    cpu: _Cores
    rate_mbit_s: _Rate | None = None


class Neighbour(_Model):
    """Another tenant that visits one host at a time and leaves its job `factor` of the host's cores.

    It moves every `every_s` seconds to a host drawn at random, never the one it is on. `seed` separates several
    neighbours of one scenario; the emulation's own seed is mixed in.
    """

    kind: Literal["neighbour"]
    every_s: _Seconds
    factor: _Factor
    seed: _Seed = 0


class Scenario(_Model):
    """Hosts and what disturbs them. Make one with `load_scenario`, whose errors are for people."""

    name: Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)] = "unnamed"
    description: Annotated[str, Field(strict=True)] = ""
    hosts: Annotated[tuple[Host, ...], Field(min_length=1, max_length=MAX_HOSTS)]
    disturbances: Annotated[tuple[Neighbour, ...], Field(max_length=8)] = ()

    @property
    def workers(self) -> int:
        """W: one rank per host."""
        return len(self.hosts)

    @property
    def total_cores(self) -> float:
        """Cores of all hosts together; noise takes its part out of them, never more."""
        return sum(host.cpu for host in self.hosts)

    @property
    def sha256(self) -> str:
        """Hash of what is emulated: name and description do not count, the order of keys in a file neither."""
        canonical = json.dumps(self.model_dump(exclude={"name", "description"}), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def shipped_scenarios() -> tuple[str, ...]:
    """Names that `load_scenario` knows without a file.

    >>> "demo" in shipped_scenarios()
    True
    """
    folder = resources.files("dynamix.emulator") / "scenarios"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_scenario(source: Scenario | Mapping[str, Any] | str | Path) -> Scenario:
    """A scenario from a shipped name, a YAML file, or a mapping. Raises `ScenarioError` naming value, range and fix.

    >>> load_scenario("demo").workers
    4
    >>> load_scenario({"hosts": [{"cpu": 0}]})
    Traceback (most recent call last):
    dynamix.errors.ScenarioError: hosts[0].cpu=0 is not possible: allowed is 0.02 or more; change it in the scenario
    """
    if isinstance(source, Scenario):
        return source
    content: Any = source if isinstance(source, Mapping) else _read(source)
    if not isinstance(content, Mapping):
        raise ScenarioError(
            "scenario", _short(content), "a mapping with the key hosts", "see a shipped one: " + _names()
        )
    if isinstance(source, str | Path) and "name" not in content:
        content = {**content, "name": _name_of(source)}
    try:
        return Scenario.model_validate(dict(content))
    except ValidationError as error:
        _explain(error)


def check_machine(scenario: Scenario, cores: float) -> None:
    """Raises `ScenarioError` when this machine has fewer cores than the scenario's hosts need together."""
    for i, host in enumerate(scenario.hosts):
        if host.cpu > cores:
            raise ScenarioError(f"hosts[{i}].cpu", host.cpu, f"at most {cores:g}, the cores of this machine",
                                "lower it, or use a larger machine")  # fmt: skip
    if scenario.total_cores > cores + 1e-9:
        raise ScenarioError(
            "sum of hosts' cpu", round(scenario.total_cores, 4), f"at most {cores:g}, the cores of this machine",
            f"multiply every cpu by {0.9 * cores / scenario.total_cores:.2f}, or use fewer hosts",
        )  # fmt: skip


def host_speeds(scenario: Scenario, t_s: float, seed: int = 0) -> list[float]:
    """Cores each host's job has `t_s` seconds after the clock's start: exact, and a function of its arguments alone.

    >>> host_speeds(load_scenario("even"), 3.0)
    [0.35, 0.35, 0.35, 0.35]
    >>> demo = load_scenario("demo")
    >>> sum(now < host.cpu for now, host in zip(host_speeds(demo, 16.0, seed=3), demo.hosts))
    1
    """
    return [job for job, _ in _shares(scenario, t_s, seed)]


def noise_shares(scenario: Scenario, t_s: float, seed: int = 0) -> list[tuple[int, float]]:
    """(host, cores) of every disturbance at `t_s`, in the scenario's order; with `host_speeds` it sums to the hosts."""
    at = [visited_host(scenario, d, t_s, seed) for d in range(len(scenario.disturbances))]
    shares = _shares(scenario, t_s, seed)
    return [(host, shares[host][1][d]) for d, host in enumerate(at)]


def visited_host(scenario: Scenario, disturbance: int, t_s: float, seed: int = 0) -> int:
    """The host that neighbour number `disturbance` is on at `t_s` (0 or more)."""
    noise = scenario.disturbances[disturbance]
    return _visits(scenario.workers, f"{seed}/{disturbance}/{noise.seed}", int(t_s // noise.every_s))


def next_change_s(scenario: Scenario, t_s: float) -> float | None:
    """The first time after `t_s` at which a neighbour moves; None if nothing ever does."""
    moves = [(t_s // noise.every_s + 1) * noise.every_s for noise in scenario.disturbances]
    return min(moves, default=None)


def _shares(scenario: Scenario, t_s: float, seed: int) -> list[tuple[float, dict[int, float]]]:
    left = [host.cpu for host in scenario.hosts]
    taken: list[dict[int, float]] = [{} for _ in left]
    for d, noise in enumerate(scenario.disturbances):
        host = visited_host(scenario, d, t_s, seed)
        taken[host][d] = left[host] * (1 - noise.factor)
        left[host] *= noise.factor
    return list(zip(left, taken, strict=True))


@lru_cache(maxsize=4096)
def _visits(hosts: int, key: str, visit: int) -> int:
    """Host of visit number `visit`; a hash and not a generator, so no library version changes a frozen scenario."""

    def draw(n: int, below: int) -> int:
        digest = hashlib.blake2b(f"{key}/{n}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % below

    host = draw(0, hosts)
    if hosts > 1:
        for n in range(1, visit + 1):
            host = (host + 1 + draw(n, hosts - 1)) % hosts
    return host


def _read(source: str | Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        fix = 'pip install "dynamix-train[emulator]"'
        raise ScenarioError("scenario", str(source), "readable once PyYAML is installed", fix) from error
    if isinstance(source, str) and source in shipped_scenarios():
        text = (resources.files("dynamix.emulator") / "scenarios" / f"{source}.yaml").read_text("utf-8")
    else:
        try:
            text = Path(source).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ScenarioError("scenario", str(source), f"{_names()}, or a readable YAML file",
                                f"check the name ({reason})") from None  # fmt: skip
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else str(error)
        raise ScenarioError("scenario", str(source), "valid YAML", f"correct {where}") from None


def _names() -> str:
    return ", ".join(shipped_scenarios())


def _name_of(source: str | Path) -> str:
    stem = "".join(c if c.isalnum() and c.isascii() else "-" for c in Path(source).stem.lower()).strip("-")
    return stem[:64] or "unnamed"


def _short(value: Any) -> Any:
    return value if len(repr(value)) <= 80 else repr(value)[:77] + "..."


_KEYS: dict[str, type[BaseModel]] = {"hosts": Host, "disturbances": Neighbour}


def _explain(error: ValidationError) -> NoReturn:
    """The first complaint of pydantic in the words of the other errors."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    value, limits = _short(first["input"]), first.get("ctx", {})
    if first["type"] == "extra_forbidden":
        model = _KEYS.get(str(first["loc"][0]), Scenario) if len(first["loc"]) > 1 else Scenario
        raise ScenarioError(f"unknown key {place}", value, "the keys " + ", ".join(model.model_fields),
                            "correct or remove the key") from None  # fmt: skip
    bounds = {"ge": "{} or more", "le": "{} or less", "gt": "more than {}", "lt": "less than {}",
              "min_length": "{} or more entries", "max_length": "{} or fewer entries",
              "expected": "{}", "pattern": "what matches {}"}  # fmt: skip
    allowed = " and ".join(text.format(limits[k]) for k, text in bounds.items() if k in limits)
    if first["type"] == "missing":
        raise ScenarioError(place, None, "a value", "the key is missing: add it to the scenario") from None
    message = first["msg"][0].lower() + first["msg"][1:]
    raise ScenarioError(place, value, allowed or message, "change it in the scenario") from None
