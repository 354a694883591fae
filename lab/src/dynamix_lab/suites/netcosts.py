"""Processor seconds of a training step by batch size for the small deep nets: `dynamix bench netcosts`.

Gives the rows of `dynamix_lab.tasks.net_costs`: alpha + beta b by least squares of relative errors, on one thread.
Processor time of this thread, so a busy machine matters little; its caches still do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dynamix.errors import ConfigError
from dynamix_lab.harness.suite import Tell, untold
from dynamix_lab.tasks import Workload, make_workload
from dynamix_lab.tasks.net_costs import NETS

SIZES, REPEATS = (8, 16, 32, 64, 128), 7


def net_costs(workload: Workload, *, sizes: tuple[int, ...] = SIZES, repeats: int = REPEATS) -> dict[str, float]:
    """alpha_s, beta_s, the number of parameters, and the largest relative error of the line."""
    model = workload.make_model(0)
    optimizer = workload.make_optimizer(model.parameters())
    data = workload.make_data(0, train=1000, test=100).train
    seconds = np.array(
        [np.median([_step_s(workload, model, optimizer, data, n) for _ in range(repeats)]) for n in sizes]
    )
    design = np.column_stack([np.ones(len(sizes)), sizes]) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    worst = float(np.abs(design @ [alpha, beta] - 1).max())
    parameters = sum(p.numel() for p in model.parameters())
    costs = {"alpha_s": round(float(alpha), 5), "beta_s": round(float(beta), 7)}
    return {**costs, "parameters": parameters, "worst_error": round(worst, 3)}


def _step_s(workload: Workload, model: torch.nn.Module, optimizer: Any, data: Any, size: int) -> float:
    inputs, targets = data.inputs[:size], data.targets[:size]
    began = time.thread_time()
    workload.loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.thread_time() - began


def all_net_costs(names: Sequence[str] | None = None, *, tell: Tell = untold) -> dict[str, dict[str, float]]:
    """`net_costs` by name, of all `dynamix_lab.tasks.net_costs.NETS` or those named. Raises `ConfigError` for an
    unknown net.
    """
    chosen = list(names or NETS)
    for name in chosen:
        if name not in NETS:
            raise ConfigError("nets", name, ", ".join(NETS), "check the spelling")
    torch.set_num_threads(1)
    found = {}
    for i, name in enumerate(chosen):
        tell(name, i / len(chosen))
        found[name] = net_costs(make_workload(f"mnist1d-{name}"))
    return found
