"""What `VirtualCluster(...)` accepts, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.errors import ConfigError
from dynamix.policies import Policy
from dynamix.runtime.arguments import job_bounds, starting_sizes
from dynamix.runtime.decide.job_facts import fixed_at
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds, Floats, Ints
from dynamix_lab.simulator.clusters import Clusters
from dynamix_lab.virtual.union_gradient import Indices, Load


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


def check_meeting(meet: str, rounds: str, averaging: Averaging | None, policy: Policy) -> None:
    """Raise `ConfigError` for an unknown way to meet, and for what does not go with the one that is given."""
    if meet not in ("gradients", "parameters", "auto"):
        raise ConfigError("meet", meet, "'gradients', 'parameters' or 'auto'", "check the spelling")
    if rounds not in ("fixed", "adaptive"):
        raise ConfigError("rounds", rounds, "'fixed' or 'adaptive'", "check the spelling")
    if rounds == "adaptive" and meet == "gradients":
        fix = "say meet='parameters' or 'auto', or widen bounds: over gradients they say how the global batch moves"
        raise ConfigError("rounds", rounds, "'fixed' where workers meet over gradients", fix)
    if averaging is not None and meet == "gradients":
        fix = "say meet='parameters', or leave averaging out"
        raise ConfigError("averaging", averaging, "None where workers meet over gradients", fix)
    if meet != "gradients" and rounds == "fixed" and getattr(policy, "even", False):
        fix = "take lb_bsp or goodput"
        raise ConfigError("policy", type(policy).__name__, "one that moves shares in rounds of a fixed size", fix)


def bounds_apart(
    bounds: Bounds | None, workers: int, batch_size: int, micro_batch: int, rounds: str
) -> tuple[Bounds, Ints]:
    """Bounds and first allocation of a round, on the grid of a live job's pieces."""
    _check_width(bounds, workers)
    each: tuple[Any, Any] = (None, None)
    total: tuple[int | None, int | None] = (None, None)
    known: dict[str, Any] = {"micro_batch": micro_batch, "apart": True}
    if bounds is not None:
        each = bounds.low.tolist(), bounds.high.tolist()
        total = total if rounds == "fixed" else (int(bounds.total_low), int(bounds.total_high))
        known |= {"quantum": bounds.quantum, "max_change": bounds.max_change}
    return job_bounds(workers, batch_size, each, total, rounds, **known)


def _check_width(bounds: Bounds | None, workers: int) -> None:
    if bounds is not None and bounds.low.shape != (workers,):
        fix = "make them with Bounds.of(workers, ...)"
        raise ConfigError("shape of bounds", bounds.low.shape, f"({workers},), one per worker", fix)


def bounds_of_job(
    bounds: Bounds | None, clusters: Clusters, batch_size: int, *, fixed: bool = False
) -> tuple[Bounds, Ints]:
    """The given or default bounds of workers that meet over gradients, and their first allocation.

    fixed   the global batch stays what it is at the start
    """
    given = _given_or_usual(bounds, clusters, batch_size)
    start = starting_sizes(batch_size, given)
    return (fixed_at(given, int(start.sum())) if fixed else given), start


def _given_or_usual(bounds: Bounds | None, clusters: Clusters, batch_size: int) -> Bounds:
    workers, cap = clusters.shape[1], clusters.memory_cap
    _check_width(bounds, workers)
    if bounds is None:
        return Bounds.of(workers, 1, 8 * batch_size if cap is None else np.minimum(8 * batch_size, cap[0]))
    return bounds


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
