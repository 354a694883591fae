"""How many steps a real task needs at which batch when the learning rate stays: `python -m dynamix.bench.stepcount`.

Trains mnist1d to its target at global batches 64 to 512 with the learning rate of the base batch, fits
steps = s (1 + critical / B) (McCandlish et al. 2018) and prints the critical batch over the noise scale measured in the
same runs: the ratio that the simulator's progress uses where no rule moves the learning rate.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from dynamix.gradients import NoiseScale
from dynamix.workloads import Workload, make_workload, score

BATCHES = (64, 128, 256, 512)
SEEDS = (9001, 9002)  # the tuning seeds: never used for figures of policies
PARTS = 4


def steps_to_target(workload: Workload, batch: int, seed: int, *, most: int) -> tuple[int | None, float]:
    """(optimizer steps until two scores in a row reach the target, mean noise scale on the way)."""
    data, model = workload.make_data(seed), workload.make_model(seed)
    optimizer = workload.make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    noise_scale, phis, above, every = NoiseScale(), [], 0, max(4, 4000 // batch)
    for step in range(1, most + 1):
        rows = torch.randint(len(data.train), (batch,), generator=generator)
        squares = _backward(workload, model, data.train.inputs[rows], data.train.targets[rows])
        whole = sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None)
        noise_scale.update(*NoiseScale.estimate(np.array(squares), whole, np.full(PARTS, batch / PARTS)))
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            phis.append(noise_scale.noise / noise_scale.signal if noise_scale.signal > 0 else np.nan)
            above = above + 1 if score(workload, model, data.test) >= workload.fixed_target() else 0
            if above == 2:
                return step - every, float(np.nanmedian(phis))
    return None, float(np.nanmedian(phis))


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


def main(most: int = 3000) -> None:
    """Print the table and the fit as JSON."""
    torch.set_num_threads(1)
    workload = make_workload("mnist1d")
    table: list[dict[str, Any]] = []
    for batch in BATCHES:
        runs = [steps_to_target(workload, batch, seed, most=most) for seed in SEEDS]
        table.append({"batch": batch, "steps": [r[0] for r in runs], "noise_scale": [round(r[1], 1) for r in runs]})
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"table": table, **fit(table)}, indent=1))


def fit(table: list[dict[str, Any]]) -> dict[str, float]:
    """steps = least_steps (1 + critical_batch / B), relative errors; and critical_batch over the median noise scale.

    >>> round(fit([{"batch": b, "steps": [100 + 6400 // b], "noise_scale": [128.0]} for b in (64, 128, 256)])["ratio"], 3)
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
    found = {"least_steps": least, "critical_batch": slope / least, "noise_scale": np.median(phi)}
    return {name: float(value) for name, value in found.items()} | {"ratio": float(slope / least / np.median(phi))}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
