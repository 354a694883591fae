"""Checks and converts the arguments of `VirtualCluster(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.errors import ConfigError
from dynamix.runtime.limits import Limits
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds, Floats
from dynamix_lab.simulator.clusters import Clusters
from dynamix_lab.virtual.union_gradient import Indices, Load


def check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `ConfigError` if one process cannot train the model for several, or if the optimizer is for another one."""
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


def check_meeting(meet: str, rounds: str, averaging: Averaging | None) -> None:
    """Raise `ConfigError` for arguments that do not fit `meet`, beyond the checks of `JobConfig`."""
    if rounds not in ("fixed", "adaptive"):
        raise ConfigError("rounds", rounds, "'fixed' or 'adaptive'", "check the spelling")
    if rounds == "adaptive" and meet == "gradients":
        fix = "say meet='parameters' or 'auto', or widen bounds: over gradients they say how the global batch moves"
        raise ConfigError("rounds", rounds, "'fixed' where workers meet over gradients", fix)
    if averaging is not None and meet == "gradients":
        fix = "say meet='parameters', or leave averaging out"
        raise ConfigError("averaging", averaging, "None where workers meet over gradients", fix)


def limits_of(bounds: Bounds | None, clusters: Clusters, batch_size: int, *, apart: bool, adaptive: bool) -> Limits:
    """The limits for `bounds` (W,), also of the global batch if it is `adaptive`.

    None: what the simulated memory holds, or for local steps (`apart`) the limits of a live job.
    """
    workers, most = clusters.shape[1], 8 * batch_size
    if bounds is None and apart:
        return Limits()
    if bounds is None:
        cap = clusters.memory_cap
        bounds = Bounds.of(workers, 1, most if cap is None else np.minimum(most, cap[0]))
    if bounds.low.shape != (workers,):
        fix = "make them with Bounds.of(workers, ...)"
        raise ConfigError("shape of bounds", bounds.low.shape, f"({workers},), one per worker", fix)
    least, largest = (int(bounds.total_low), int(bounds.total_high)) if adaptive else (None, None)
    return Limits(bounds.low.tolist(), bounds.high.tolist(), least, largest, bounds.quantum, bounds.max_change)


def costs_of(sample_costs: ArrayLike, samples: int) -> Floats:
    """The costs as an array. Raises `ConfigError` unless every sample has a finite one, 0 or more."""
    costs = np.asarray(sample_costs, dtype=np.float64)
    if costs.shape != (samples,):
        raise ConfigError("shape of sample_costs", costs.shape, f"({samples},)", "give one for each sample")
    if not (np.isfinite(costs) & (costs >= 0)).all():
        raise ConfigError("sample_costs", costs[~(np.isfinite(costs) & (costs >= 0))][0], "0 or more", "check them")
    return costs


def loader_of(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> Load:
    """A function from indices to a collated batch, as DataLoader fetches it."""

    def load(indices: Indices) -> tuple[Any, Any]:
        whole = getattr(dataset, "__getitems__", None)
        batch = collate_fn(whole(indices) if whole is not None else [dataset[i] for i in indices])
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            fix = "wrap the data set, or give a collate_fn that returns such a pair"
            raise ConfigError("batch", type(batch).__name__, "a pair (inputs, target)", fix)
        return batch[0], batch[1]

    return load
