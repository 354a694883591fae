"""S-MADRL against its baselines on the excavation task (`dynamix bench excavation`).

Every (method, seed) is one training by the same curriculum over the same number of steps of the worlds; its final
weights are evaluated with 1 to 8 agents. Settings are the classes' defaults for all. A finished (method, seed) is a
line of OUT/runs.jsonl, and a call that finds such lines runs only what is missing. MADDPG is there where AgileRL is
(`maddpg.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError, StateError
from dynamix_lab.experiments.excavation.gate_search import GateSearch
from dynamix_lab.experiments.excavation.ground import GROUNDS
from dynamix_lab.experiments.excavation.learner import DQNConfig
from dynamix_lab.experiments.excavation.lessons import CURRICULUM, Stage
from dynamix_lab.experiments.excavation.maddpg import MADDPGConfig, not_installed
from dynamix_lab.experiments.excavation.mappo import MAPPOConfig
from dynamix_lab.experiments.excavation.summary import summarise
from dynamix_lab.experiments.excavation.trial import CHANGES, LEARNED_GATE, base, run_one, task_of
from dynamix_lab.experiments.excavation.world import ExcavationConfig

METHODS = (
    "s-madrl", "visits", "madqn", "sight-2", "mappo", "mappo-typed", "maddpg", "hand", "counting", "random"
)  # fmt: skip
# Where a method's settings are; hand and random have none.
_SETTINGS = {
    **dict.fromkeys(("s-madrl", "visits", "madqn", "sight-2"), "dqn"),
    **dict.fromkeys(("mappo", "mappo-typed"), "mappo"),
    "maddpg": "maddpg",
}


def available() -> tuple[str, ...]:
    """All methods, without MADDPG where AgileRL is not installed.

    s-madrl        typed traces, motion learned by DQN with some at rest, and a threshold gate learned for it
    visits, madqn, sight-2   DQN with the paper's one trace, without traces, and without but seeing two cells far
    mappo, mappo-typed       without traces, and with typed ones
    hand           motion by hand, with a learned gate
    counting       motion by hand; a planner's rule lets `Counting.most` in at a time

    Of those with a gate the summary also has NAME-open, in which nobody rests. NAME:CHANGE is one on typed traces with
    its traces changed (`trial.CHANGES`) while it learns and afterwards.
    """
    found = importlib.util.find_spec("agilerl") is not None
    return tuple(name for name in METHODS if found or name != "maddpg")


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """What is compared. `evaluation_worlds` episodes of one horizon for every number of `agents`, method and seed.

    large   numbers of agents on larger grounds, with a tunnel for every so many as most of `agents`; nothing is learned
            there
    """

    methods: tuple[str, ...] = field(default_factory=available)
    agents: tuple[int, ...] = (1, 2, 4, 6, 8)
    seeds: tuple[int, ...] = tuple(range(10))
    task: ExcavationConfig = field(default_factory=ExcavationConfig)
    dqn: DQNConfig = field(default_factory=DQNConfig)
    mappo: MAPPOConfig = field(default_factory=MAPPOConfig)
    maddpg: MADDPGConfig = field(default_factory=MADDPGConfig)
    gate: GateSearch = field(default_factory=GateSearch)
    stages: tuple[Stage, ...] = CURRICULUM
    worlds: int = 16
    evaluation_worlds: int = 16
    large: tuple[int, ...] = (16, 32, 64)

    def __post_init__(self) -> None:
        for name in self.methods:
            if base(name) not in METHODS:
                allowed = f"{', '.join(METHODS)}, some with :{', :'.join(CHANGES)}"
                raise ConfigError("methods", name, allowed, "check the spelling")
            task_of(self.task, name)
        if not (self.methods and self.agents and self.seeds):
            raise ConfigError("methods, agents, seeds", "none", "one or more of each", "check the configuration")

    @classmethod
    def of(
        cls,
        *,
        methods: Sequence[str] | None = None,
        seeds: int = 10,
        ground: str = "two-lane",
        slow: float = 1.0,
        horizon: int = 1000,
        scale: float = 1.0,
    ) -> ExperimentConfig:
        """From options; `scale` is of the number of steps of every stage, `slow` the speed of every second agent."""
        if not 0 < scale < float("inf"):
            raise ConfigError("scale", scale, "above 0, finite", "1 is the whole curriculum")
        if ground not in GROUNDS:
            raise ConfigError("ground", ground, ", ".join(GROUNDS), "check the spelling")
        whole = MAPPOConfig().rollout
        stages = (dataclasses.replace(s, steps=max(1, round(s.steps * scale / whole)) * whole) for s in CURRICULUM)
        task = ExcavationConfig(GROUNDS[ground], horizon=horizon, speeds=(1.0, slow))
        return cls(
            methods=available() if methods is None else tuple(methods),
            seeds=tuple(range(seeds)),
            stages=tuple(stages),
            task=task,
        )

    def fingerprint(self, method: str) -> str:
        """Of everything that a finished run of `method` depends on; methods and seeds may be added later."""
        others = {"dqn", "mappo", "maddpg"} - {_SETTINGS.get(base(method))}
        others |= {"methods", "seeds", *(() if base(method) in LEARNED_GATE else ("gate",))}
        facts = {k: v for k, v in dataclasses.asdict(self).items() if k not in others}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def run(
    config: ExperimentConfig | None = None,
    out: str | Path | None = None,
    *,
    processes: int = 1,
    minutes: float | None = None,
    tell: Callable[[str, float], None] = lambda what, done: None,
) -> dict[str, Any]:
    """Run what is missing in `out`, tell how long each run took, and return the summary.

    minutes   after which no other training begins: the summary is of what is finished, so methods may differ by a
              training; 0 for what `out` holds

    A run that fails does not keep those beside it from being kept; its error is raised when they are. Raises
    `StateError` if `out` holds runs of another configuration or a damaged line.
    """
    if minutes is not None and not minutes >= 0:
        raise ConfigError("minutes", minutes, "0 or more", "leave it out to run everything")
    until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    config = config or ExperimentConfig()
    path = None if out is None else Path(out) / "runs.jsonl"
    if "maddpg" in config.methods and "maddpg" not in available():
        raise not_installed()
    runs = _finished(path, config)
    done = {(r["method"], r["seed"]) for r in runs}
    missing = [(m, s) for s in config.seeds for m in config.methods if (m, s) not in done]
    for result in _results(config, missing, processes, until):
        runs.append(result)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        took = f"{result['total_s']} s ({result['processor_s']} s of processor)"
        tell(f"{result['method']} seed {result['seed']}: {took}", len(runs) / (len(done) + len(missing)))
    return summarise(config, runs)


def _results(
    config: ExperimentConfig, missing: Sequence[tuple[str, int]], processes: int, until: float
) -> Iterator[dict[str, Any]]:
    if processes == 1:
        for method, seed in missing:
            if time.monotonic() >= until:
                return
            yield run_one(config, method, seed)
        return
    waiting, failed = list(missing), None
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        under_way: set[Future[dict[str, Any]]] = set()
        while True:
            while waiting and failed is None and len(under_way) < processes and time.monotonic() < until:
                under_way.add(pool.submit(run_one, config, *waiting.pop(0)))
            if not under_way:
                break
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                if (error := future.exception()) is None:
                    yield future.result()
                else:
                    failed = failed or error
    if failed is not None:
        raise failed


def _finished(path: Path | None, config: ExperimentConfig) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    try:
        runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        stale = {r["method"] for r in runs if r["fingerprint"] != config.fingerprint(r["method"])} & {*config.methods}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is damaged ({error}): remove its last line, that run is done again") from error
    if stale:
        names = ", ".join(sorted(stale))
        fix = f"remove the lines of {names}, or choose another folder"
        raise StateError(f"{path} holds runs of another configuration ({names}): {fix}")
    return runs
