"""An experiment: rows at places with seeds, on a cluster, in one or more settings. Read from a TOML file."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.runtime.rules import AUTO
from dynamix_lab.experiment.measures import OF_BUDGET, SETTINGS
from dynamix_lab.experiment.places import JOBS, JobNumbers, Place, places_named
from dynamix_lab.harness.reference import references
from dynamix_lab.opponents.profiled import Profiled
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.opponents.tuning import CONSTANT, ROWS
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS

CLUSTERS = ("virtual", "emulator")
FACTORS: dict[str, Callable[[int], float]] = {"r0": lambda workers: 1.0, "sqrt(W) r0": math.sqrt, "W r0": float}
"""By the rate's name: the factor on r0 for W workers."""
USUAL = "usual"  # W r0; sqrt(W) r0 for Adam and others that divide by the gradient's size (docs/adaptive.md)
POLICIES = {"profiled": lambda _: Profiled(), **references("device-even")}  # defined only here; to check a name
SCHEDULE = dict.fromkeys(OF_BUDGET, "cosine")  # of a recipe, by setting; all other settings have a constant rate


@dataclass(frozen=True, slots=True)
class Row:
    """A row: how it uses a recipe for one worker with b0 samples a step at rate r0.

    name          in tables; "single" is one worker alone
    policy, lr_rule, global_batch, local, count    as in `Trial`; without `policy` and `local` it is one worker alone
    rate          "r0", "sqrt(W) r0", "W r0", "usual" (W r0 for SGD, sqrt(W) r0 for Adam and the like), or a number
                  that multiplies r0
    schedule      of the rate; None: the setting's
    rate_for      `Controller` is told that the rate is meant for b0 samples
    rounds        with `local`: the number of averagings in a budget, instead of the number of steps between them
    workloads, settings    the only ones in which the row runs; empty: all

    Every worker begins with b0 samples a step.
    """

    name: str
    policy: str | None = None
    rate: str | float = "r0"
    lr_rule: str = AUTO
    global_batch: str = "fixed"
    local: Mapping[str, Any] | None = None
    schedule: str | None = None
    rounds: int | None = None
    rate_for: bool = False
    count: str = "samples"
    workloads: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.rate, str) and self.rate not in (*FACTORS, USUAL):
            raise ConfigError(f"rate of {self.name}", self.rate, ", ".join((*FACTORS, USUAL)), "or give a number")
        if self.rounds is not None and (self.rounds < 1 or self.local is None):
            raise ConfigError(f"rounds of {self.name}", self.rounds, "1 or more, with local steps", "say how they meet")

    def trial(self, job: JobNumbers, setting: str, batch: int, workers: int) -> Trial:
        """The row's trial, with a job's recipe for `batch` samples. Raises `ConfigError` for impossible settings."""
        usual = SCHEDULE.get(setting, "constant")
        known = "constant" if self.schedule == "constant" else usual
        factors = {**FACTORS, USUAL: job.usual_factor}
        factor = factors[self.rate](workers) if isinstance(self.rate, str) else self.rate
        return Trial(
            self.name,
            self.policy,
            batch,
            job.recipe(known, batch) * factor,
            lr_rule=self.lr_rule,
            local=self._local(job.budget / (workers * batch)),
            schedule=self.schedule or usual,
            budget=job.budget,
            global_batch=self.global_batch,
            rate_for=batch if self.rate_for else None,
            count=self.count,
        )

    def _local(self, steps: float) -> LocalSettings | None:
        """How workers average in a run of so many steps each."""
        if self.local is None:
            return None
        often = {} if self.rounds is None else {"steps": max(round(steps / self.rounds), 1)}
        return LocalSettings.from_dict({**self.local, **often})


@dataclass(frozen=True, slots=True)
class Tuning:
    """How rows are tuned, all in the same way (`dynamix_lab.opponents.tuning`).

    seeds      of the tuning runs; none: each row takes the first trial of its grid (a smoke run)
    schedules  of the rate, which every row tries, each with its length in budgets
    climbs     how often the search continues from the best trial to its neighbours
    """

    seeds: tuple[int, ...]
    schedules: tuple[tuple[str, float], ...] = (CONSTANT,)
    climbs: int = 2


@dataclass(frozen=True)
class Experiment:
    """Rows at places with seeds. Everything else is derived.

    name, title   of the command, and for its help and page
    cluster     whose seconds count: "virtual", the virtual clock, or "emulator", real processes on emulated devices
    settings    names in `SETTINGS`: how a run ends and what is read from it
    rows        how each uses a recipe, or names of rows that are tuned
    places      as in `Place.of`
    seeds       the number of pairs; `first_seed`, `first_seed` + 1, ...
    against     rows whose times divide the other rows' times
    beside      reference rows for scores: the best of them at a place is used; empty: none
    ours        rows that are compared with the best of all others
    batches     b0 of the recipes
    budget      samples of a run, instead of the jobs' own
    tuning      None: rows run as they are
    about       notes for the reader of the page

    `check` raises `ConfigError` before anything runs; names of missing rows are refused at once.
    """

    name: str
    title: str
    cluster: str
    settings: tuple[str, ...]
    rows: tuple[Row, ...]
    places: tuple[str, ...]
    against: tuple[str, ...]
    seeds: int = 5
    first_seed: int = 0
    beside: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    budget: int | None = None
    tuning: Tuning | None = None
    about: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("against", "beside", "ours"):
            _known(name, getattr(self, name), self.names_in("rows"))

    @property
    def all_seeds(self) -> list[int]:
        """The seeds of the pairs."""
        return list(range(self.first_seed, self.first_seed + self.seeds))

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be run."""
        _known("cluster", (self.cluster,), CLUSTERS)
        _known("settings", self.settings, tuple(SETTINGS))
        names = [row.name for row in self.rows]
        if len({file_key(name) for name in names}) < len(names):
            raise ConfigError("rows", ", ".join(names), "names that differ by letters or digits", "rename one")
        places_named(self.places)
        if self.budget is not None and self.budget < 1:
            raise ConfigError("budget", self.budget, "1 sample or more", "leave it out for the jobs' own")
        for row in self.rows:
            _known(f"workloads of {row.name}", row.workloads, tuple(JOBS))
            _known(f"settings of {row.name}", row.settings, tuple(SETTINGS))
            if row.policy is not None:
                make_policy(row.policy, others=POLICIES)
        for name, least in (("seeds", 1), ("first_seed", 0)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(name, value, f"{least} or more", "ask for others")
        if self.cluster == "emulator" and not set(self.settings) <= set(OF_BUDGET):
            allowed = f"{' or '.join(OF_BUDGET)}: nobody scores a live run"
            raise ConfigError("settings", ", ".join(self.settings), allowed, "say match")
        if self.tuning is None:
            if not self.batches:
                raise ConfigError("batches", (), "one or more", "say for which recipes of one worker")
            for text in self.places:
                place = Place.of(text, self.budget)
                for setting in self.settings:
                    for batch in self.batches:
                        for row in self.rows_at(place, setting):
                            row.trial(place.job, setting, batch, 2)
            return
        _known("rows that are tuned", names, ROWS)
        if set(self.settings) & set(OF_BUDGET) or self.batches or self.cluster != "virtual":
            allowed = "a target, no batches, on the virtual clock"
            raise ConfigError("tuning", ", ".join(self.settings), allowed, "leave the tuning out")
        if used := set(self.all_seeds) & {*TUNING_SEEDS, *self.tuning.seeds}:
            raise ConfigError("seeds", sorted(used), "seeds on which nothing was tuned", "take others")

    def names_in(self, what: str) -> list[str]:
        """The names of its rows, places, settings or batches."""
        return [row.name if isinstance(row, Row) else str(row) for row in getattr(self, what)]

    def rows_at(self, place: Place, setting: str) -> list[Row]:
        """The rows for a place's job in a setting."""
        return [
            row
            for row in self.rows
            if (not row.workloads or place.workload in row.workloads) and (not row.settings or setting in row.settings)
        ]

    def only(self, **chosen: Sequence[str] | None) -> Experiment:
        """The same experiment with only these rows, places, settings or batches. None: all.

        Names left out disappear from `against`, `beside` and `ours`. Raises `ConfigError` for unknown names.
        """
        changes: dict[str, Any] = {}
        for name, wanted in chosen.items():
            if wanted is not None and name != "places":  # a place can be any job on any cluster
                known = self.names_in(name)
                _known(name, wanted, known)
                changes[name] = tuple(
                    one for one, text in zip(getattr(self, name), known, strict=True) if text in wanted
                )
            elif wanted is not None:
                changes[name] = places_named(tuple(wanted))
        names = [row.name for row in changes.get("rows", self.rows)]
        for name in ("against", "beside", "ours"):
            changes[name] = tuple(row for row in getattr(self, name) if row in names)
        changes["against"] = changes["against"] or tuple(names[:1])
        return dataclasses.replace(self, **changes)

    def smoke(self) -> Experiment:
        """The smallest part that covers everything: one place and batch, three rows, one seed, no tuning."""
        rows = [row.name for row in self.rows[:3]]
        part = self.only(rows=rows, settings=self.settings[:1], places=self.places[:1])
        tuning = self.tuning and dataclasses.replace(self.tuning, seeds=())
        return dataclasses.replace(part, seeds=1, batches=self.batches[:1], tuning=tuning)


def file_key(name: str) -> str:
    """A row's name as part of a file name.

    >>> file_key("static, sqrt(W) r0")
    'static-sqrt-W-r0'
    """
    return "-".join("".join(c if c.isalnum() or c == "_" else " " for c in name).split())


def shipped() -> list[str]:
    """Names of the shipped experiments."""
    folder = resources.files("dynamix_lab.experiments")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name: str) -> Experiment:
    """An experiment by name, or from a TOML file. A file with `like = NAME` inherits the rest from another one.

    Raises `ConfigError` for an unknown name and an invalid file.
    """
    plain = _plain(name)
    plain.setdefault("name", Path(name).name.removesuffix(".toml"))
    rows = plain.pop("rows", {})
    plain["rows"] = tuple(_made(Row, {"name": row, **said}, f"row {row}") for row, said in rows.items())
    if (tuning := plain.pop("tuning", None)) is not None:
        plain["tuning"] = _made(Tuning, tuning, "tuning")
    plain["places"] = places_named(tuple(plain.get("places", ())))
    return _made(Experiment, plain, name)


def _plain(name: str) -> dict[str, Any]:
    """A file as TOML, with what it inherits; rows by name."""
    if name in shipped():
        text = (resources.files("dynamix_lab.experiments") / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml") and Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        raise ConfigError("experiment", name, f"{', '.join(shipped())}, or a TOML file", "check the spelling")
    try:
        plain = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("experiment", name, f"TOML ({error})", "mend the file") from error
    rows = plain.pop("rows", {})
    plain["rows"] = rows if isinstance(rows, dict) else {row: {} for row in rows}
    if (other := plain.pop("like", None)) is None:
        return plain
    base = _plain(other)
    return {**base, **plain, "rows": base["rows"] | plain["rows"]}


Plain = TypeVar("Plain", Row, Tuning, Experiment)


def _made(cls: type[Plain], plain: Mapping[str, Any], what: str) -> Plain:
    """Make a dataclass from a TOML table, with lists as tuples."""
    names = [entry.name for entry in fields(cls)]
    _known(f"fields of {what}", tuple(plain), names)
    values = {name: _tuples(value) for name, value in plain.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(what, sorted(plain), f"a table with {', '.join(names)}", str(error)) from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(what, name, ", ".join(map(str, known)), "check the spelling")
