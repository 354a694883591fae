"""S-MADRL against its baselines on the excavation task (`dynamix bench excavation`).

Every (method, seed) is one training by the same curriculum over the same number of steps of the worlds; its final
weights are evaluated with 1 to 8 agents. Settings are the classes' defaults for all. A finished (method, seed) is a
line of OUT/runs.jsonl, and a call that finds such lines runs only what is missing. MADDPG is there where AgileRL is
(`maddpg.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamix.errors import ConfigError, StateError
from dynamix_lab.experiments.excavation.aggregate import stratified
from dynamix_lab.experiments.excavation.gate_search import LOST, GateSearch, busiest, learn_gate, settings
from dynamix_lab.experiments.excavation.ground import GROUNDS
from dynamix_lab.experiments.excavation.hand import HandMotion
from dynamix_lab.experiments.excavation.learner import (
    Actions,
    DQNConfig,
    DQNTraining,
    evaluate,
    without_traces,
    work,
)
from dynamix_lab.experiments.excavation.lessons import CURRICULUM, Stage
from dynamix_lab.experiments.excavation.maddpg import MADDPGConfig, MADDPGTraining, not_installed
from dynamix_lab.experiments.excavation.mappo import MAPPOConfig, MAPPOTraining
from dynamix_lab.experiments.excavation.resting import Counting, Forced, Gate, ThresholdConfig, Thresholds
from dynamix_lab.experiments.excavation.world import ACTIONS, Excavation, ExcavationConfig, Seen

METHODS = (
    "s-madrl", "visits", "madqn", "sight-2", "mappo", "mappo-typed", "maddpg", "hand", "counting", "random"
)  # fmt: skip
_LEARNED_GATE = ("s-madrl", "hand")
_HAND = ("hand", "counting")
# Where a method's settings are; hand and random have none.
_SETTINGS = {
    **dict.fromkeys(("s-madrl", "visits", "madqn", "sight-2"), "dqn"),
    **dict.fromkeys(("mappo", "mappo-typed"), "mappo"),
    "maddpg": "maddpg",
}
MEASURES = ("reward", "pellets_per_1000", "collisions_per_1000", "gini", "halves")
EVALUATION_SEED = 770_000
RESTERS = 0.5  # most of the agents that rest while S-MADRL's motion is learned
SETTLING = 300  # steps that the others have before it is measured what a loss cost


def available() -> tuple[str, ...]:
    """All methods, without MADDPG where AgileRL is not installed.

    s-madrl        typed traces, motion learned by DQN with some at rest, and a threshold gate learned for it
    visits, madqn, sight-2   DQN with the paper's one trace, without traces, and without but seeing two cells far
    mappo, mappo-typed       without traces, and with typed ones
    hand           motion by hand, with a learned gate
    counting       motion by hand; a planner's rule lets `Counting.most` in at a time

    Of those with a gate the summary also has NAME-open, in which nobody rests.
    """
    found = importlib.util.find_spec("agilerl") is not None
    return tuple(name for name in METHODS if found or name != "maddpg")


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """What is compared. `evaluation_worlds` episodes of one horizon for every number of `agents`, method and seed."""

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

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHODS:
                raise ConfigError("methods", name, ", ".join(METHODS), "check the spelling")
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
        others = {"dqn", "mappo", "maddpg"} - {_SETTINGS.get(method)}
        facts = {k: v for k, v in dataclasses.asdict(self).items() if k not in {"methods", "seeds"} | others}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def run_one(config: ExperimentConfig, method: str, seed: int) -> dict[str, Any]:
    """Train one method with one seed and evaluate it: results by number of agents, and the seconds it took."""
    torch.set_num_threads(1)
    started, processor = time.perf_counter(), time.process_time()
    task = task_of(config.task, method)
    act = _trained(config, task, method, seed)
    search = dataclasses.replace(config.gate, agents=max(config.agents))
    learned = learn_gate(act, task, search, seed=seed) if method in _LEARNED_GATE else None
    trained_s = time.perf_counter() - started
    gate = _gate(method, learned, seed)
    results = {}
    for agents in config.agents:
        shares = evaluate(
            act, task, agents=agents, worlds=config.evaluation_worlds, seed=EVALUATION_SEED + seed, gate=gate
        )
        results[str(agents)] = shares.summary()
    more: dict[str, Any] = {}
    if learned is not None:
        how: dict[str, Any] = {"worlds": config.evaluation_worlds, "seed": EVALUATION_SEED + seed}
        most = max(config.agents)
        more["gate"] = settings(learned)
        more["open"] = {str(n): evaluate(act, task, agents=n, **how).summary() for n in config.agents}
        more["forced"] = {
            str(count): evaluate(act, task, agents=most, gate=functools.partial(Forced, count=count), **how).summary()
            for count in range(min(5, most))
        }
    if (most := max(config.agents)) > LOST + 1:
        more["loss"] = lost_and_back(act, task, gate, agents=most, worlds=config.evaluation_worlds, seed=seed)
    return {
        **more,
        "method": method,
        "seed": seed,
        "fingerprint": config.fingerprint(method),
        "agents": results,
        "training_s": round(trained_s, 1),
        "total_s": round(time.perf_counter() - started, 1),
        "processor_s": round(time.process_time() - processor, 1),
    }


def task_of(task: ExcavationConfig, method: str) -> ExcavationConfig:
    """The task as agents of `method` see it."""
    typed = method in ("s-madrl", "mappo-typed", *_HAND)
    return dataclasses.replace(
        task, signs="typed" if typed else "visits", sight=2 if method == "sight-2" else task.sight
    )


def lost_and_back(
    act: Callable[[Seen], Actions],
    task: ExcavationConfig,
    gate: Callable[[Excavation], Gate] | None,
    *,
    agents: int,
    worlds: int,
    seed: int,
) -> dict[str, float]:
    """Pellets of a horizon with everybody, `SETTLING` steps after the `LOST` busiest are gone, and after they are back.

    `without` and `again` are parts of what all delivered before.
    """
    env = Excavation(task, agents=agents, worlds=worlds, seed=EVALUATION_SEED + 1000 + seed)
    rests, delivered = None if gate is None else gate(env), []
    for change in (None, env.leave, env.come_back):
        if change is not None:
            change(busiest(env) if change == env.leave else env.absent)
        work(env, act, rests, SETTLING)
        before = env.delivered.sum(-1)
        work(env, act, rests, task.horizon)
        delivered.append(float((env.delivered.sum(-1) - before).mean()))
    whole = max(delivered[0], 1e-9)
    per_1000 = 1000.0 / task.horizon * delivered[0]
    return {"pellets_per_1000": per_1000, "without": delivered[1] / whole, "again": delivered[2] / whole}


def run(
    config: ExperimentConfig | None = None,
    out: str | Path | None = None,
    *,
    processes: int = 1,
    tell: Callable[[str, float], None] = lambda what, done: None,
) -> dict[str, Any]:
    """Run what is missing in `out`, tell how long each run took, and return the summary.

    Raises `StateError` if `out` holds runs of another configuration or a damaged line.
    """
    config = config or ExperimentConfig()
    path = None if out is None else Path(out) / "runs.jsonl"
    if "maddpg" in config.methods and "maddpg" not in available():
        raise not_installed()
    runs = _finished(path, config)
    done = {(r["method"], r["seed"]) for r in runs}
    missing = [(m, s) for s in config.seeds for m in config.methods if (m, s) not in done]
    for result in _results(config, missing, processes):
        runs.append(result)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        took = f"{result['total_s']} s ({result['processor_s']} s of processor)"
        tell(f"{result['method']} seed {result['seed']}: {took}", len(runs) / (len(done) + len(missing)))
    return summarise(config, runs)


def summarise(config: ExperimentConfig, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Interquartile means over seeds by method and number of agents ("all": over all numbers), and Lorenz curves.

    In "all", pellets are per agent, because more agents fetch more and would outweigh the others.
    """
    methods: dict[str, Any] = {}
    opened = [{**r, "method": f"{r['method']}-open", "agents": r["open"]} for r in runs if "open" in r]
    for r in opened:
        for key in ("loss", "forced", "gate", "open"):
            r.pop(key, None)
    for name in (shown for method in config.methods for shown in (method, f"{method}-open")):
        mine = [r for r in (*runs, *opened) if r["method"] == name and r["seed"] in config.seeds]
        mine.sort(key=lambda r: int(r["seed"]))
        if not mine:
            continue
        by_agents = {str(n): _measures([r["agents"][str(n)] for r in mine]) for n in config.agents}
        per_agent = [[r["agents"][str(n)]["pellets_per_1000"] / n for n in config.agents] for r in mine]
        losses = [r["loss"] for r in mine if "loss" in r]
        parts = {k: stratified([loss[k] for loss in losses]).to_dict() for k in ("without", "again") if losses}
        rests = [r["forced"] for r in mine if "forced" in r and "open" in r]
        forced = {
            k: stratified([f[k]["pellets_per_1000"] for f in rests]).to_dict() for k in (rests[0] if rests else ())
        }
        methods[name] = {
            **({"loss": parts} if losses else {}),
            **({"forced": forced, "gates": [r["gate"] for r in mine]} if rests else {}),
            "seeds": [r["seed"] for r in mine],
            "agents": by_agents,
            "all": {"pellets_per_1000_and_agent": stratified(per_agent).to_dict()},
            "seconds": [r["total_s"] for r in mine],
        }
    steps = sum(stage.steps for stage in config.stages) * config.worlds
    prints = {name: config.fingerprint(name) for name in methods if name in METHODS}
    facts = {"steps_of_worlds": steps, "fingerprints": prints, "config": dataclasses.asdict(config)}
    return {**facts, "methods": methods}


def table(summary: dict[str, Any]) -> str:
    """The summary as lines of text: interquartile mean [95 % interval] over seeds."""
    lines = [f"{'agents':>6}  {'method':<9}" + "".join(f"{name:>30}" for name in MEASURES)]
    names = list(summary["methods"])
    for agents in summary["config"]["agents"]:
        for name in names:
            cells = summary["methods"][name]["agents"][str(agents)]
            lines.append(f"{agents:>6}  {name:<9}" + "".join(f"{_cell(cells[m]):>30}" for m in MEASURES))
    return "\n".join(lines)


def draw(summary: dict[str, Any], path: Path) -> None:
    """Pellets by number of agents (interquartile mean and its interval), and who did the work with the most agents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    pellets, work = figure.subplots(1, 2)
    agents = summary["config"]["agents"]
    for name, method in summary["methods"].items():
        cells = [method["agents"][str(n)]["pellets_per_1000"] for n in agents]
        known = [(n, c) for n, c in zip(agents, cells, strict=True) if c["iqm"] is not None]
        x, mean = [n for n, _ in known], np.array([c["iqm"] for _, c in known])
        ends = np.array([[c["iqm"] if c[end] is None else c[end] for _, c in known] for end in ("low", "high")])
        pellets.errorbar(x, mean, np.abs(ends - mean), label=name, marker="o", capsize=3)
        lorenz = method["agents"][str(max(agents))]["lorenz"]
        if lorenz is not None:  # None: nobody delivered anything
            work.plot(np.linspace(0, 1, len(lorenz)), lorenz, label=name)
    work.plot([0, 1], [0, 1], color="0.7", linestyle=":", label="equal work")
    pellets.set(xlabel="agents", ylabel="pellets per 1,000 steps, all agents", xticks=agents)
    work.set(xlabel="share of agents, least working first", ylabel="share of pellets", title=f"{max(agents)} agents")
    pellets.legend(frameon=False)
    work.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _cell(estimate: dict[str, float | None]) -> str:
    if estimate["iqm"] is None:
        return "-"
    interval = "" if estimate["low"] is None else f" [{estimate['low']:.2f}, {estimate['high']:.2f}]"
    return f"{estimate['iqm']:.2f}{interval}"


def _measures(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in MEASURES:
        known = [r[name] for r in results if r[name] is not None]
        out[name] = {**(stratified(known).to_dict() if known else _NOTHING), "seeds": [r[name] for r in results]}
    curves = [r["lorenz"] for r in results if r["lorenz"] is not None]
    return {**out, "lorenz": np.mean(curves, axis=0).tolist() if curves else None}


_NOTHING = {"iqm": None, "low": None, "high": None}


def _gate(method: str, learned: ThresholdConfig | None, seed: int) -> Callable[[Excavation], Gate] | None:
    if learned is not None:
        return lambda env: Thresholds(env, learned, seed=seed)
    return Counting if method == "counting" else None


def _trained(config: ExperimentConfig, task: ExcavationConfig, method: str, seed: int) -> Callable[[Seen], Actions]:
    if method in _HAND:
        return HandMotion(task, seed=seed)
    if method == "random":
        rng = np.random.default_rng(seed)
        return lambda seen: rng.integers(len(ACTIONS), size=seen.shape[:-1])
    how: dict[str, Any] = {"stages": config.stages, "worlds": config.worlds, "seed": seed}
    if method in ("mappo", "mappo-typed"):
        mappo = MAPPOTraining(task, dataclasses.replace(config.mappo, traces=method == "mappo-typed"), **how)
        mappo.run()
        return mappo.act
    if method == "maddpg":
        maddpg = MADDPGTraining(task, config.maddpg, **how)
        maddpg.run()
        return maddpg.act
    dqn = without_traces(config.dqn) if method in ("madqn", "sight-2") else config.dqn
    rest = RESTERS if method == "s-madrl" else config.dqn.resters
    training = DQNTraining(task, dataclasses.replace(dqn, resters=rest), **how)
    training.run()
    return training.learner.act


def _results(config: ExperimentConfig, missing: Sequence[tuple[str, int]], processes: int) -> Any:
    if processes == 1:
        yield from (run_one(config, method, seed) for method, seed in missing)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_one, config, method, seed) for method, seed in missing]):
            yield future.result()


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
