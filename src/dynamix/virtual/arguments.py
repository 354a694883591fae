"""What `VirtualCluster(...)` accepts, and what it makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sized
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.errors import ConfigError
from dynamix.policies import Policy
from dynamix.runtime.arguments import job_bounds
from dynamix.runtime.parameters import Averaging
from dynamix.simulator.clusters import Clusters
from dynamix.virtual.union_gradient import Indices, Load
from dynamix.window import Bounds, Floats, Ints


def check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `ConfigError` for a model that one process cannot train for several, or an optimizer of another one."""
    if isinstance(model, DistributedDataParallel):
        fix = "pass model.module: there are no ranks"
        raise ConfigError("model", "DistributedDataParallel", "the bare module", fix)
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        fix = "use BatchNorm; statistics of the union batch are not modelled"
        raise ConfigError("model", "a model with SyncBatchNorm", "a model whose shares are independent", fix)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(p) for p in model.parameters()}:
        fix = "make it from model.parameters()"
        raise ConfigError("optimizer", type(optimizer).__name__, "one that holds the model's parameters", fix)


def meets_over_parameters(meet: str, averaging: Averaging | None, policy: Policy) -> bool:
    """Whether. Raises `ConfigError` for another way, and for what does not go with the one that is given."""
    if meet not in ("gradients", "parameters"):
        raise ConfigError("meet", meet, "'gradients' or 'parameters'", "check the spelling")
    apart = meet == "parameters"
    if averaging is not None and not apart:
        fix = "say meet='parameters', or leave averaging out"
        raise ConfigError("averaging", averaging, "None where workers meet over gradients", fix)
    if apart and getattr(policy, "even", False):
        fix = "take lb_bsp or goodput"
        raise ConfigError("policy", type(policy).__name__, "one that moves shares, with meet='parameters'", fix)
    return apart


def bounds_apart(bounds: Bounds | None, workers: int, batch_size: int, micro_batch: int) -> tuple[Bounds, Ints]:
    """Bounds and first allocation of rounds whose size stays as it is, on the grid of a live job's pieces."""
    _check_width(bounds, workers)
    each: tuple[Any, Any] = (None, None) if bounds is None else (bounds.low.tolist(), bounds.high.tolist())
    more: dict[str, Any] = {} if bounds is None else {"quantum": bounds.quantum, "max_change": bounds.max_change}
    known: dict[str, Any] = {"micro_batch": micro_batch, "apart": True}
    return job_bounds(workers, batch_size, each, (None, None), "fixed", **known, **more)


def _check_width(bounds: Bounds | None, workers: int) -> None:
    if bounds is not None and bounds.low.shape != (workers,):
        fix = "make them with Bounds.of(workers, ...)"
        raise ConfigError("shape of bounds", bounds.low.shape, f"({workers},), one per worker", fix)


def bounds_of_job(bounds: Bounds | None, clusters: Clusters, batch_size: int, dataset: Sized) -> Bounds:
    """The given or default bounds; no global step may outgrow the data set, as in `Controller`."""
    workers, cap = clusters.shape[1], clusters.memory_cap
    _check_width(bounds, workers)
    if bounds is None:
        bounds = Bounds.of(workers, 1, 8 * batch_size if cap is None else np.minimum(8 * batch_size, cap[0]))
    most = max(len(dataset) // bounds.quantum * bounds.quantum, int(np.max(bounds.total_low)))
    return dataclasses.replace(bounds, total_high=np.minimum(bounds.total_high, most))


def costs_of(sample_costs: ArrayLike, samples: int) -> Floats:
    """As numbers. Raises `ConfigError` unless there is a finite one, 0 or more, for every sample."""
    costs = np.asarray(sample_costs, dtype=np.float64)
    if costs.shape != (samples,):
        raise ConfigError("shape of sample_costs", costs.shape, f"({samples},)", "give one for each sample")
    if not (np.isfinite(costs) & (costs >= 0)).all():
        raise ConfigError("sample_costs", costs[~(np.isfinite(costs) & (costs >= 0))][0], "0 or more", "check them")
    return costs


def loader_of(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> Load:
    """Indices to a collated batch, as DataLoader fetches it."""

    def load(indices: Indices) -> tuple[Any, Any]:
        whole = getattr(dataset, "__getitems__", None)
        batch = collate_fn(whole(indices) if whole is not None else [dataset[i] for i in indices])
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            fix = "wrap the data set, or give a collate_fn that returns such a pair"
            raise ConfigError("batch", type(batch).__name__, "a pair (inputs, target)", fix)
        return batch[0], batch[1]

    return load
