"""Microseconds of a stigmergic decision by number of workers, compared with a central policy's for all of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dynamix.policies.registry import make_policy
from dynamix.policies.stigmergic.policy import StigmergicPolicy, in_range, pretrained
from dynamix.policies.stigmergic.traces import Own
from dynamix.window import Bounds, Floats, Ints, Window


def decision_costs(workers: Sequence[int], *, repeats: int = 60) -> list[dict[str, Any]]:
    """Per W, medians on one thread, in microseconds.

    one_rank        work of one rank of a job: make its traces, read all traces, choose
    taking_in       a rank's work on the W sizes that arrive: sum and check. Exactly-once needs them, so this grows with
                    W
    per_worker      a simulated decision of all W, over W
    central         the `dynamix` policy's decision for all W, in one place
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [{"workers": w, **_costs(w, repeats)} for w in workers]
    finally:
        torch.set_num_threads(threads)


def _costs(workers: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    bounds, sizes = Bounds.of(workers), np.full(workers, 128)
    fewer = max(repeats * 100 // max(workers, 100), 5)
    window = _window(rng, sizes)
    everyone, central = pretrained(), make_policy("dynamix")
    return {
        "one_rank": _one_rank(workers, window, bounds, repeats),
        "taking_in": _median_us(lambda: in_range(sizes, bounds, current=sizes), repeats),
        "per_worker": _median_us(lambda: everyone.decide(window, bounds), fewer) / workers,
        "central": _median_us(lambda: central.decide(window, bounds), fewer),
    }


def _one_rank(workers: int, window: Window, bounds: Bounds, repeats: int) -> float:
    """One rank's decision in a field with the traces of all others."""
    policy, everybody = pretrained(), Own.of(window)
    others, mine = pretrained().observe(everybody)[1].sum(-2), _first(everybody)
    alone = Bounds(
        bounds.low[:1], bounds.high[:1], bounds.total_low, bounds.total_high, bounds.quantum, bounds.max_change
    )
    return _median_us(lambda: _decide(policy, mine, others, alone), repeats)


def _decide(policy: StigmergicPolicy, mine: Own, others: Floats, alone: Bounds) -> None:
    sense, left = policy.observe(mine)
    policy.choose(mine, sense, others + left, alone)


def _first(own: Own) -> Own:
    names = [field.name for field in dataclasses.fields(own) if field.name != "workers"]
    return dataclasses.replace(own, **{name: getattr(own, name)[:1].copy() for name in names})


def _window(rng: np.random.Generator, sizes: Ints) -> Window:
    compute = 0.1 * np.exp(0.3 * rng.normal(size=len(sizes)))
    seconds = {
        "compute": compute,
        "compute_std": 0.05 * compute,
        "wait": compute.max() - compute,
        "communication": 0.03,
    }
    return Window.of(sizes, **seconds, noise=5e4, signal=1.0, steps=5, cpu=0.5)


def _median_us(run: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return round(float(np.median(taken[3:])) * 1e6, 2)
