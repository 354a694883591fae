"""How fast the worlds are: steps of a world per second of one core."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from dynamix_lab.excavation.world import ACTIONS, Excavation, ExcavationConfig


def world_speed(
    task: ExcavationConfig, *, agents: int = 8, worlds: int = 16, steps: int = 1000, repeats: int = 5
) -> dict[str, Any]:
    """Random actions; the median of `repeats`, by processor time. A step moves all agents of a world."""
    env = Excavation(task, agents=agents, worlds=worlds, seed=0)
    actions = np.random.default_rng(0).integers(len(ACTIONS), size=(64, worlds, agents))
    rates = []
    for _ in range(repeats):
        started = time.process_time()
        for step in range(steps):
            env.step(actions[step % len(actions)])
        rates.append(worlds * steps / max(time.process_time() - started, 1e-9))
    return {"agents": agents, "worlds": worlds, "steps_per_core_second": round(statistics.median(rates)), "all": rates}
