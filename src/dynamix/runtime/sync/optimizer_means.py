"""Averages optimizer state over workers after local steps: moments, and numbers such as step counters."""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dynamix.errors import UsageError
from dynamix.runtime.sync.collectives import Sums, Workers, has_mean

KNOWN: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # passed to `wrap`, or made by such an optimizer
ON_CPU = ("step", "mu_product")  # on the CPU unless one of the optimizer's kernels reads them
PRODUCTS = ("mu_product",)  # NAdam's: such numbers are averaged by their logarithms
_SCHEDULED = {"lr", "momentum", "weight_decay"}  # set by the loop, even if an optimizer takes them as `**settings`


@dataclass(frozen=True, order=True)
class Entry:
    """One entry of an optimizer's state, of a parameter or a group; equal on all ranks that have it.

    place   number of the parameter over all optimizers' groups, in order; the groups have the numbers after these
    shape   None: a Python number
    """

    place: int
    name: str
    shape: tuple[int, ...] | None
    dtype: str

    @property
    def is_number(self) -> bool:
        """Whether it is a single number, such as a step counter, which is sent separately from the moments."""
        return self.shape is None or ((self.name == "step" or not self.shape) and "complex" not in self.dtype)


class GroupMemory:
    """The state that an optimizer keeps in its groups, in addition to its arguments (schedule-free, Prodigy): numbers
    and tensors.

    An argument of the optimizer, such as a learning rate, belongs to the loop. All other values that have changed since
    this object was made are state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        kinds = type(optimizer).__mro__[:-1]
        self._given = {name for kind in kinds for name in inspect.signature(kind).parameters} | _SCHEDULED
        self._began = [copy.deepcopy(self._told(group)) for group in optimizer.param_groups]

    def of(self, number: int, group: dict[str, Any], known: set[str]) -> dict[str, Any]:
        """The values of group `number` to average; `known`: names that other workers have."""
        began = self._began[number] if number < len(self._began) else {}
        told = self._told(group)
        return {name: v for name, v in told.items() if name in known or name not in began or _unlike(began[name], v)}

    def _told(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: v for name, v in group.items() if name not in self._given and _has_mean(v)}


def _has_mean(value: Any) -> bool:
    if isinstance(value, Tensor):
        return has_mean(value) or value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _unlike(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return not torch.equal(before, now)
    return bool(before != now)


class OptimizerMeans:
    """Averages the state of one or several optimizers over workers, including what they keep in their groups.

    A worker may lack an entry, because it has taken no step, or the parameter had no gradient on it. It then sends
    nothing for the entry, and gets the mean of the workers that have it. At every averaging the ranks compare which
    entries exist, so that all send the same.

    optimizers   with the state that each keeps in its groups
    """

    def __init__(self, optimizers: Mapping[Optimizer, GroupMemory], workers: Workers) -> None:
        self.optimizers, self.workers = optimizers, workers
        self.layout: list[Entry] = []
        self._places: list[tuple[Optimizer, int, Tensor | None]] = []  # number of the group; its parameter or None

    def meet(self, weight: float, told: dict[str, Any] | None = None) -> None:
        """Average all entries, with `weight` for this worker's. A collective call.

        told   a state dict of the only optimizer, into which the means are written; None: into the optimizers
        """
        before, groups = self._places, [(of, n, None) for of in self.optimizers for n in range(len(of.param_groups))]
        self._places = [*((of, n, p) for of, n, _ in groups for p in of.param_groups[n]["params"]), *groups]
        if [id(p) for *_, p in self._places] != [id(p) for *_, p in before]:
            self.layout = []
        own = self._own()
        missing = torch.tensor([float(bool(own.keys() - set(self.layout)))])
        self.workers.add(missing, dist.ReduceOp.MAX)
        self.workers.wait()
        if missing.item():
            known = self.workers.gather([*own.keys() | set(self.layout)])
            self.layout = sorted({entry for of_rank in known for entry in of_rank}, key=str)
            own = self._own()
        if not self.layout:
            return
        moments, numbers = ([e for e in self.layout if e.is_number is kind] for kind in (False, True))
        tensors = [own[e] if e in own else self._blank(e) for e in moments]
        held = [weight * (e in own) for e in self.layout]
        values = [weight * _told(e, own[e]) if weight and e in own else 0.0 for e in numbers]
        table = torch.tensor([*held, *values], dtype=torch.float64)
        self.workers.add(table)
        sums = Sums(tensors, weight, self.workers)
        self.workers.wait()
        weights = dict(zip(self.layout, table.tolist(), strict=False))
        totals: list[tuple[Entry, Any]] = [*zip(moments, sums.sums(), strict=True)]
        totals += zip(numbers, table[len(self.layout) :].tolist(), strict=True)
        for entry, total in totals:
            if weights[entry]:
                mean = total / weights[entry]
                mean = math.exp(mean) if entry.name in PRODUCTS else mean
                self._put(self._memory(entry.place, told), entry, mean)

    def _own(self) -> dict[Entry, Any]:
        """This worker's values to average. Raises `UsageError` for a value that has no mean."""
        found: dict[Entry, Any] = {}
        for place, (optimizer, number, parameter) in enumerate(self._places):
            if parameter is None:
                known = {entry.name for entry in self.layout if entry.place == place}
                memory = self.optimizers[optimizer].of(number, optimizer.param_groups[number], known)
            else:
                memory = optimizer.state.get(parameter, {})
            for name, value in memory.items():
                if _has_mean(value):
                    moves = parameter is None and isinstance(value, Tensor) and value.dim()  # sent with the moments
                    found |= _entry(place, name, value.to(self._device(place)) if moves else value)
                elif value is not None:
                    kind = f"{type(optimizer).__name__} keeps {name!r}, of type {type(value).__name__}, for a parameter"
                    fix = "average with Averaging(optimizer_state='kept') or 'reset', and save each worker's own"
                    raise UsageError(f"{kind}, which has no mean over workers: {fix}")
        return found

    def _blank(self, entry: Entry) -> Tensor:
        dtype, device = getattr(torch, entry.dtype.split(".")[-1]), self._device(entry.place)
        return torch.zeros(entry.shape or (), dtype=dtype, device=device)

    def _device(self, place: int) -> torch.device:
        """The parameter's device, or that of the group's first one."""
        optimizer, number, parameter = self._places[place]
        parameters = optimizer.param_groups[number]["params"] if parameter is None else [parameter]
        return parameters[0].device if parameters else torch.device("cpu")

    def _memory(self, place: int, told: dict[str, Any] | None) -> Any:
        """The dict of this worker's optimizer, or of `told`, that holds the entry."""
        optimizer, number, parameter = self._places[place]
        if parameter is None:
            return (optimizer.param_groups if told is None else told["param_groups"])[number]
        if told is None:
            return optimizer.state[parameter]
        numbers = [n for group in told["param_groups"] for n in group["params"]]
        return told["state"].setdefault(numbers[place], {})

    def _put(self, state: dict[str, Any], entry: Entry, mean: Any) -> None:
        held, (optimizer, number, parameter) = state.get(entry.name), self._places[entry.place]
        if parameter is None and isinstance(held, (int, float)) and math.isclose(held, mean, rel_tol=1e-12):
            return  # equal on all, such as a scheduler's value
        if entry.shape is None:
            state[entry.name] = round(mean) if entry.dtype == "int" else mean
            return
        if not isinstance(held, Tensor) or held.is_sparse:
            held = self._blank(entry)
            group = optimizer.param_groups[number]
            beside = parameter is not None and (group.get("capturable") or group.get("fused"))  # it counts steps there
            if entry.name in ON_CPU and not beside:
                held = held.cpu()
            state[entry.name] = held
        if isinstance(mean, Tensor):
            held.copy_(mean)
        else:
            held.fill_(mean if held.is_floating_point() else round(mean))


def _entry(place: int, name: str, value: Any) -> dict[Entry, Any]:
    if isinstance(value, Tensor):
        # Momentum of sparse gradients is sparse until the first averaging: each worker has other rows.
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        return {Entry(place, name, tuple(value.shape), str(value.dtype)): dense}
    return {Entry(place, name, None, type(value).__name__): value}


def _told(entry: Entry, value: Any) -> float:
    number = float(value)
    return math.log(max(number, 1e-300)) if entry.name in PRODUCTS else number


def without_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Remove a placeholder's gradients, because an optimizer changes nothing without gradients.

    Returns the arguments for `optimizer.step` if a closure would compute gradients again, else None.
    """

    def forget() -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = None

    forget()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def quiet() -> Any:
        loss = closure()
        forget()
        return loss

    return (args[0], quiet), {name: value for name, value in kwargs.items() if name != "closure"}
