"""One training of one method, and all measurements with its final weights."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dynamix_lab.excavation.config import HAND, LEARNED_GATE, ExperimentConfig, base, task_of
from dynamix_lab.excavation.gate_search import LOST, SETTLING, busiest, learn_gate, settings
from dynamix_lab.excavation.ground import drawn, held_out
from dynamix_lab.excavation.hand import HandMotion
from dynamix_lab.excavation.learner import Actions, DQNTraining, evaluate, without_traces, work
from dynamix_lab.excavation.mappo import MAPPOTraining
from dynamix_lab.excavation.resting import Counting, Forced, Gate, ThresholdConfig, Thresholds
from dynamix_lab.excavation.world import ACTIONS, Excavation, ExcavationConfig, Seen

EVALUATION_SEED = 770_000
# Minimum and maximum fraction of agents that rest while motion is learned for a gate. On drawn grounds no gate is
# learned, and the minimum is 0: the motion must also work if no agent rests.
RESTERS = {"s-madrl": (0.0, 0.5), "s-madrl-team": (0.125, 0.4)}

Motion = Callable[[ExcavationConfig], Callable[[Seen], Actions]]  # for a given task


def run_one(config: ExperimentConfig, method: str, seed: int) -> dict[str, Any]:
    """Train one method with one seed and evaluate it. Returns the results by place, and the seconds it took."""
    torch.set_num_threads(1)
    started, processor = time.perf_counter(), time.process_time()
    task = task_of(config.task, method)
    motion = _trained(config, task, method, seed)
    trained_s = time.perf_counter() - started
    act, most = motion(task), max(config.agents)
    learned = None
    if base(method) in LEARNED_GATE and not config.drawn:
        learned = learn_gate(act, task, dataclasses.replace(config.gate, agents=most), seed=seed)
    elif base(method) == "hand":
        learned = ThresholdConfig()
    gate = _gate(method, learned, seed)
    worlds, at, places = config.evaluation_worlds, EVALUATION_SEED + seed, config.places()

    def found(place: str, gate: Callable[[Excavation], Gate] | None) -> dict[str, Any]:
        shape, agents = places[place]
        there = dataclasses.replace(task, shape=shape)
        return evaluate(motion(there), there, agents=agents, worlds=worlds, seed=at, gate=gate).summary()

    more: dict[str, Any] = {}
    if learned is not None:
        more["gate"] = settings(learned)
        more["open"] = {name: found(name, None) for name in places}
        if not config.drawn:
            count = range(min(5, most))
            more["forced"] = {str(n): found(str(most), functools.partial(Forced, count=n)) for n in count}
    if most > LOST + 1 and not config.drawn:
        more["loss"] = lost_and_back(act, task, gate, agents=most, worlds=worlds, seed=seed)
    for name, rule in (("large", gate), ("open_large", None)):
        if config.large and not config.drawn and (name == "large" or learned is not None):
            more[name] = {
                str(n): _on_larger_ground(act, task, rule, agents=n, of=most, worlds=worlds, seed=at)
                for n in config.large
            }
    return {
        **more,
        "method": method,
        "seed": seed,
        "fingerprint": config.fingerprint(method),
        "agents": {name: found(name, gate) for name in places},
        "training_s": round(trained_s, 1),
        "total_s": round(time.perf_counter() - started, 1),
        "processor_s": round(time.process_time() - processor, 1),
    }


def lost_and_back(
    act: Callable[[Seen], Actions],
    task: ExcavationConfig,
    gate: Callable[[Excavation], Gate] | None,
    *,
    agents: int,
    worlds: int,
    seed: int,
) -> dict[str, float | None]:
    """Pellets of a horizon with all agents, without the `LOST` busiest, with all again; each after `SETTLING` steps.

    `without` and `again` are fractions of the first number; None if it is 0.
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
    per_1000 = 1000.0 / task.horizon * delivered[0]
    without, again = (part / delivered[0] if delivered[0] else None for part in delivered[1:])
    return {"pellets_per_1000": per_1000, "without": without, "again": again}


def _on_larger_ground(
    act: Callable[[Seen], Actions],
    task: ExcavationConfig,
    gate: Callable[[Excavation], Gate] | None,
    *,
    agents: int,
    of: int,
    worlds: int,
    seed: int,
) -> dict[str, Any]:
    """Evaluate on a ground with a tunnel for every `of` agents and one nest for all."""
    tunnels = max(agents // of, 1)
    larger = dataclasses.replace(task, shape=dataclasses.replace(task.shape, tunnels=tunnels))
    shares = evaluate(act, larger, agents=agents, worlds=max(worlds // tunnels, 1), seed=seed, gate=gate)
    return {"tunnels": tunnels, **shares.summary()}


def _gate(method: str, learned: ThresholdConfig | None, seed: int) -> Callable[[Excavation], Gate] | None:
    if learned is not None:
        return lambda env: Thresholds(env, learned, seed=seed)
    return Counting if base(method) == "counting" else None


def _trained(config: ExperimentConfig, task: ExcavationConfig, method: str, seed: int) -> Motion:
    name = base(method)
    if name in HAND:
        return lambda task: HandMotion(task, seed=seed)
    if name == "random":
        rng = np.random.default_rng(seed)
        return lambda task: lambda seen: rng.integers(len(ACTIONS), size=seen.shape[:-1])
    grounds = functools.partial(drawn, but=[shape for shape, _ in held_out()]) if config.drawn else None
    how: dict[str, Any] = {"stages": config.stages, "worlds": config.worlds, "seed": seed, "grounds": grounds}
    least, highest = RESTERS.get(name, (0.0, 0.0))
    rest = (0.0 if config.drawn else least, highest)
    if name in ("mappo", "mappo-typed", "s-madrl-team"):
        mappo = MAPPOTraining(task, dataclasses.replace(config.mappo, traces=name != "mappo", resters=rest), **how)
        mappo.run()
        return lambda task: mappo.act
    dqn = without_traces(config.dqn) if name in ("madqn", "sight-2") else config.dqn
    training = DQNTraining(task, dataclasses.replace(dqn, resters=rest), **how)
    training.run()
    return lambda task: training.learner.act
