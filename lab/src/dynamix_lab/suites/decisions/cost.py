"""Processor time of decisions and of training rounds: `python -m dynamix_lab.suites.decisions.cost`.

The module runs under any revision of dynamix, so it imports nothing of it but through `revision.found`. It prints one
line of JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from dynamix_lab.suites.decisions.corpus import generator, normal
from dynamix_lab.suites.decisions.revision import found

POLICIES, WORKERS, DECISIONS, FIRST = ("goodput", "dynamix", "guarded:dynamix"), 1024, 100, 10
# Two rounds of hindsight training and the smallest validation.
RECIPE: dict[str, Any] = {
    "workers": (2, 8, 32),
    "easy_workers": 32,
    "rows": 128,
    "windows": 16,
    "clone_rounds": 0,
    "regret_rounds": 2,
    "ppo_updates": 0,
    "validate_every": 100,
    "validation_rows": 6,
    "validation_windows": 2,
    "validation_workers": (2,),
}


def windows(count: int) -> list[Any]:
    """Windows of one cluster with slowdowns, known noise and sizes that move, the same for every policy."""
    rng, shape = generator(7), (WORKERS,)
    alpha, beta = 0.05 * rng.random(shape), 1e-3 * 4.0 ** rng.random(shape)
    made, slow = [], np.ones(shape)
    for t in range(count):
        healed = np.where(rng.random(shape) < 0.1, 1.0, slow)
        slow = np.where(rng.random(shape) < 0.01, 1.0 + 3.0 * rng.random(shape), healed)
        sizes = np.maximum(np.rint(128 * np.exp(0.1 * normal(rng, shape))), 1).astype(np.int64)
        compute = (alpha + beta * sizes) * slow * np.exp(0.01 * normal(rng, shape))
        fields = {"compute": compute, "compute_std": 0.03 * compute, "wait": compute.max() - compute}
        fields |= {"communication": np.full(shape, 0.05), "data": 0.001 * rng.random(shape)}
        fields |= {"loss_change": normal(rng, shape), "gradient_norm_sq": 1.0 + rng.random(shape)}
        fields |= {"cpu": rng.random(shape), "memory": rng.random(shape)}
        whole = {"steps": 10.0, "step": 10.0 * (t + 1), "age": 10.0, "base_batch": 128.0 * WORKERS}
        training = {"noise": 1e6 * 1.01**t, "signal": 1.0, "global_norm_sq": 1.0}
        made.append(found("Window").of(sizes, **fields, **whole, **training))
    return made


def decision_ms() -> dict[str, float]:
    """Median processor milliseconds of a decision for `WORKERS` workers, by policy."""
    seen, bounds = windows(DECISIONS + FIRST), found("Bounds").of(WORKERS, 1, 1024)
    figures = {}
    for name in POLICIES:
        policy, took = found("make_policy")(name), []
        for window in seen:
            began = time.thread_time()
            policy.decide(window, bounds)
            took.append(time.thread_time() - began)
        figures[name] = 1e3 * float(np.median(took[FIRST:]))
    return figures


def training_s() -> float:
    """Processor seconds of two training rounds of `dynamix`."""
    train, config = found("train"), found("TrainingConfig")(**RECIPE)
    began = time.process_time()
    train(config, 0, processes=1)
    return time.process_time() - began


def main() -> None:
    """Measure and print."""
    import torch

    torch.set_num_threads(1)
    print(json.dumps({"decision_ms": decision_ms(), "training_s": training_s()}))


if __name__ == "__main__":
    main()
