"""How many steps a real task needs at which batch: `dynamix bench stepcount`.

Trains to a target at several global batches. With rule `none` every batch has the learning rate of the base batch: fits
steps = s (1 + critical / B) (McCandlish et al. 2018) and prints the critical batch over the noise scale measured in the
same runs, the ratio that the simulator's progress uses where no rule moves the learning rate. With `adascale` it prints
what AdaScale counts as progress, sum of (phi + B0) / (phi + B) B/B0 at the phi of the run itself: the law of the
simulator and of the rules holds as far as that is the same at every batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix.runtime.noise import NoiseScale
from dynamix.runtime.scaling import LearningRate
from dynamix_lab.harness.suite import Tell, untold
from dynamix_lab.tasks import Workload, make_workload, score

BATCHES = {"mnist1d": (64, 128, 256, 512), "digits": (16, 32, 64, 128, 256)}
TARGETS = {"digits": 0.95}  # of workloads that have none of their own
SEEDS = (9001, 9002)  # the tuning seeds: never used for figures of policies
PARTS = 4


@dataclass(frozen=True, slots=True)
class Count:
    """Optimizer steps until two scores in a row reached the target, or None; median noise scale on the way, in samples;
    progress by AdaScale's count, in steps of the base batch."""

    steps: int | None
    noise_scale: float
    progress: float


def steps_to_target(workload: Workload, batch: int, seed: int, *, most: int, rule: str = "none") -> Count:
    """Trains at global batch `batch` with the learning rate that the named rule of `dynamix.runtime.scaling` gives
    it.
    """
    data, model = workload.make_data(seed), workload.make_model(seed)
    optimizer, base = workload.make_optimizer(model.parameters()), workload.base_batch
    learning_rate = LearningRate(optimizer, rule)
    generator = torch.Generator().manual_seed(seed)
    target = TARGETS[workload.name] if workload.target is None else workload.target
    noise_scale, phis, above, every = NoiseScale(), [], 0, max(2, 2 * base // batch)
    for step in range(1, most + 1):
        rows = torch.randint(len(data.train), (batch,), generator=generator)
        squares = _backward(workload, model, data.train.inputs[rows], data.train.targets[rows])
        whole = sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None)
        noise_scale.update(*NoiseScale.estimate(np.array(squares), whole, np.full(PARTS, batch / PARTS)))
        noise, signal = noise_scale.noise, noise_scale.signal
        learning_rate.factor = learning_rate.rule(batch / base, noise, signal, base_batch=base)
        optimizer.step()
        optimizer.zero_grad()
        phis.append(noise / signal if signal > 0 else np.nan)
        if step % every == 0:
            above = above + 1 if score(workload, model, data.test) >= target else 0
            if above == 2:
                return _count(step - every, np.array(phis[: step - every]), batch, base)
    return _count(None, np.array(phis), batch, base)


def _count(steps: int | None, phi: np.ndarray[Any, Any], batch: int, base: int) -> Count:
    gain = np.where(np.isnan(phi), 1.0, (phi + base) / (phi + batch)) * batch / base  # no signal: phi is infinite
    return Count(steps, float(np.nanmedian(phi)), float(gain.sum()))


def _backward(workload: Workload, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Leaves the mean gradient in `.grad`; |g|^2 of each of PARTS equal parts."""
    total, squares = [torch.zeros_like(p) for p in model.parameters()], []
    for x, y in zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True):
        workload.loss(model(x), y).backward()
        squares.append(sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None))
        for kept, p in zip(total, model.parameters(), strict=True):
            kept.add_(0.0 if p.grad is None else p.grad / PARTS)
            p.grad = None
    for kept, p in zip(total, model.parameters(), strict=True):
        p.grad = kept
    return squares


def count_steps(name: str = "mnist1d", rule: str = "none", *, most: int = 3000, tell: Tell = untold) -> dict[str, Any]:
    """`table` with a row a batch, and the fit or the spread of progress (`fit`).

    Raises `ConfigError` for a workload whose target is not fixed here, and for an unknown rule.
    """
    if name not in BATCHES:
        raise ConfigError("workload", name, ", ".join(BATCHES), "take one whose target is fixed in this module")
    torch.set_num_threads(1)
    workload = make_workload(name)
    table: list[dict[str, Any]] = []
    for i, batch in enumerate(BATCHES[name]):
        tell(f"global batch {batch}", i / len(BATCHES[name]))
        runs = [steps_to_target(workload, batch, seed, most=most, rule=rule) for seed in SEEDS]
        noise, progress = [round(r.noise_scale, 1) for r in runs], [round(r.progress) for r in runs]
        table.append({"batch": batch, "steps": [r.steps for r in runs], "noise_scale": noise, "progress": progress})
    return {"workload": name, "rule": rule, "seeds": list(SEEDS), "table": table, **fit(table)}


def lines(result: Mapping[str, Any]) -> list[str]:
    """For people: a row a batch, then what was fitted."""
    keys = ("least_steps", "critical_batch", "noise_scale", "ratio", "progress_spread")
    rows = [json.dumps(row) for row in result["table"]]
    return [*rows, ", ".join(f"{key} {result[key]:.4g}" for key in keys if key in result)]


def fit(table: list[dict[str, Any]]) -> dict[str, float]:
    """steps = least_steps (1 + critical_batch / B), relative errors; and critical_batch over the median noise scale.

    Where progress was counted, `progress_spread` is the largest mean of a batch over the smallest.

    >>> rows = [{"batch": b, "steps": [100 + 6400 // b], "noise_scale": [128.0]} for b in (64, 128, 256)]
    >>> round(fit(rows)["ratio"], 3)
    0.5
    """
    known = [
        (row["batch"], steps, phi)
        for row in table
        for steps, phi in zip(row["steps"], row["noise_scale"], strict=True)
        if steps
    ]
    batch, steps, phi = np.array(known, dtype=float).T
    design = np.column_stack([np.ones_like(batch), 1 / batch]) / steps[:, None]
    least, slope = np.linalg.lstsq(design, np.ones_like(batch), rcond=None)[0]
    means = [np.mean(row["progress"]) for row in table if all(row["steps"])] if "progress" in table[0] else []
    found = {"least_steps": least, "critical_batch": slope / least, "noise_scale": np.median(phi)}
    found |= {"progress_spread": max(means) / min(means)} if means else {}
    return {name: float(value) for name, value in found.items()} | {"ratio": float(slope / least / np.median(phi))}
