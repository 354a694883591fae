"""What an optimizer remembers, averaged over workers that stepped apart: moments, and the numbers beside them."""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dynamix.errors import UsageError
from dynamix.runtime.sync.collectives import Bucket, Workers, buckets

KNOWN: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # given to `wrap`, or made by what was given
ON_CPU = ("step", "mu_product")  # where the optimizer runs no kernel that reads them
PRODUCTS = ("mu_product",)  # NAdam's: the mean of such numbers is that of their logarithms
_SCHEDULED = {"lr", "momentum", "weight_decay"}  # the loop's, also where an optimizer takes them as `**settings`


@dataclass(frozen=True, order=True)
class Entry:
    """One thing that an optimizer remembers of a parameter, or of a group; alike on all ranks that have it.

    place   number of the parameter, over the optimizers and their groups in order; then come the groups
    shape   None: a Python number
    """

    place: int
    name: str
    shape: tuple[int, ...] | None
    dtype: str

    @property
    def is_number(self) -> bool:
        """Whether it is one number, such as the steps taken, which travels beside the moments."""
        return self.shape is None or ((self.name == "step" or not self.shape) and "complex" not in self.dtype)


class Remembers(Protocol):
    """What of an optimizer is averaged; an `Optimizer` is one."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]


class GroupMemory:
    """What an optimizer keeps in its groups, beside what it was given (schedule-free, Prodigy): numbers and tensors.

    An argument of the optimizer, as a learning rate is, belongs to the loop. What else has changed since this was made
    is the optimizer's memory.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        kinds = type(optimizer).__mro__[:-1]
        self._given = {name for kind in kinds for name in inspect.signature(kind).parameters} | _SCHEDULED
        self._began = [copy.deepcopy(self._told(group)) for group in optimizer.param_groups]

    def of(self, number: int, group: dict[str, Any], known: set[str]) -> dict[str, Any]:
        """What is to be averaged of group `number`; `known` to be so from other workers."""
        began = self._began[number] if number < len(self._began) else {}
        told = self._told(group)
        return {name: v for name, v in told.items() if name in known or name not in began or _unlike(began[name], v)}

    def _told(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: v for name, v in group.items() if name not in self._given and _has_mean(v)}


def _has_mean(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex() or value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _unlike(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return not torch.equal(before, now)
    return bool(before != now)


class OptimizerView:
    """An optimizer's parameters, and a copy of what it remembers of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = [dict(group) for group in optimizer.param_groups]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter in optimizer.state:
                self.state[parameter] = copy.deepcopy(optimizer.state[parameter])
        self.kind, self._plain = type(optimizer).__name__, optimizer.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own would be."""
        of_number: dict[int, Tensor] = {}
        for saved, group in zip(self._plain["param_groups"], self.param_groups, strict=True):
            of_number |= dict(zip(saved["params"], group["params"], strict=True))
        held = {number: self.state[p] for number, p in of_number.items() if p in self.state}
        groups = [
            {name: own.get(name, value) if name != "params" else value for name, value in saved.items()}
            for saved, own in zip(self._plain["param_groups"], self.param_groups, strict=True)
        ]
        return {**self._plain, "state": {**self._plain["state"], **held}, "param_groups": groups}


class OptimizerMeans:
    """The state of one or several optimizers, and their groups' memory, on its way to its mean over workers.

    A worker that has an entry not yet (it has taken no step, or the parameter had no gradient on it) sends nothing for
    it, and is given the mean of those that have it. What there is to average is compared at every meeting, so that all
    send alike.

    in_groups   what each optimizer keeps in its groups
    beside      carries numbers and what is compared, on CPUs
    """

    def __init__(
        self, optimizers: Sequence[Remembers], in_groups: Sequence[GroupMemory], workers: Workers, beside: Workers
    ) -> None:
        self.optimizers, self.in_groups, self.workers, self.beside = optimizers, in_groups, workers, beside
        self.layout: list[Entry] = []
        self._of: list[tuple[Remembers, Tensor]] = []
        self._groups: list[dict[str, Any]] = []

    def meeting(self, weight: float) -> Iterator[None]:
        """All of it, this worker's state weighing `weight`; at every `yield` what was begun has to arrive."""
        before = len(self._groups), [id(p) for _, p in self._of]
        self._groups = [group for of in self.optimizers for group in of.param_groups]
        self._of = [(of, p) for of in self.optimizers for group in of.param_groups for p in group["params"]]
        if (len(self._groups), [id(p) for _, p in self._of]) != before:
            self.layout = []
        own = self._own()
        missing = torch.tensor([float(bool(own.keys() - set(self.layout)))])
        self.beside.add(missing, dist.ReduceOp.MAX)
        yield
        if missing.item():
            known = self.beside.gather([*own.keys() | set(self.layout)])
            yield
            self.layout = sorted({entry for of_rank in known for entry in of_rank}, key=str)
            own = self._own()
        if not self.layout:
            return
        moments, numbers = ([e for e in self.layout if e.is_number is kind] for kind in (False, True))
        tensors = [own[e] if e in own else self._blank(e) for e in moments]
        held = [weight * (e in own) for e in self.layout]
        values = [weight * _told(e, own[e]) if weight and e in own else 0.0 for e in numbers]
        table = torch.tensor([*held, *values], dtype=torch.float64)
        self.beside.add(table)
        payloads = [Bucket(bucket, weight) for bucket in buckets(tensors)]
        for payload in payloads:
            self.workers.add(payload.flat)
        yield
        weights = dict(zip(self.layout, table.tolist(), strict=False))
        number_of = dict(zip(numbers, table[len(self.layout) :].tolist(), strict=True))
        means = {id(tensor): mean for payload in payloads for tensor, mean in payload.sums()}
        for entry, tensor in zip(moments, tensors, strict=True):
            if weights[entry]:
                self._put(entry, means[id(tensor)].div_(weights[entry]))
        for entry in numbers:
            if weights[entry]:
                mean = number_of[entry] / weights[entry]
                self._put(entry, math.exp(mean) if entry.name in PRODUCTS else mean)

    def _own(self) -> dict[Entry, Any]:
        """What is to be averaged. Raises `UsageError` for what has no mean."""
        found: dict[Entry, Any] = {}
        for place, (optimizer, parameter) in enumerate(self._of):
            for name, value in optimizer.state.get(parameter, {}).items():
                if _has_mean(value):
                    found |= _entry(place, name, value)
                elif value is not None:
                    name_of = getattr(optimizer, "kind", type(optimizer).__name__)
                    kind = f"{name_of} keeps {name!r}, of type {type(value).__name__}, for a parameter"
                    fix = "average with Averaging(optimizer_state='kept') or 'reset', and save each worker's own"
                    raise UsageError(f"{kind}, which has no mean over workers: {fix}")
        place = len(self._of)
        for optimizer, memory in zip(self.optimizers, self.in_groups, strict=True):
            for number, group in enumerate(optimizer.param_groups):
                known = {entry.name for entry in self.layout if entry.place == place}
                for name, value in memory.of(number, group, known).items():
                    whole = isinstance(value, Tensor) and value.dim()  # it travels beside moments
                    found |= _entry(place, name, value.to(self._device(place)) if whole else value)
                place += 1
        return found

    def _blank(self, entry: Entry) -> Tensor:
        dtype, device = getattr(torch, entry.dtype.split(".")[-1]), self._device(entry.place)
        return torch.zeros(entry.shape or (), dtype=dtype, device=device)

    def _device(self, place: int) -> torch.device:
        """Of the parameter, or of the group's first one."""
        of_group = place - len(self._of)
        parameters = [self._of[place][1]] if of_group < 0 else self._groups[of_group]["params"]
        return parameters[0].device if parameters else torch.device("cpu")

    def _on_device(self, place: int) -> bool:
        """Whether the optimizer counts steps of this parameter beside it."""
        if place >= len(self._of):
            return False
        optimizer, parameter = self._of[place]
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        return bool(group.get("capturable") or group.get("fused"))

    def _memory(self, place: int) -> dict[str, Any]:
        """What this worker's optimizer remembers there."""
        if place >= len(self._of):
            return self._groups[place - len(self._of)]
        optimizer, parameter = self._of[place]
        state: dict[str, Any] = optimizer.state[parameter]
        return state

    def _put(self, entry: Entry, mean: Any) -> None:
        state = self._memory(entry.place)
        held = state.get(entry.name)
        if entry.place >= len(self._of) and isinstance(held, (int, float)) and math.isclose(held, mean, rel_tol=1e-12):
            return  # all have it alike, as what a scheduler has put there
        if entry.shape is None:
            state[entry.name] = round(mean) if entry.dtype == "int" else mean
        elif isinstance(held, Tensor) and not held.is_sparse:
            held.copy_(mean) if isinstance(mean, Tensor) else held.fill_(
                mean if held.is_floating_point() else round(mean)
            )
        else:
            made = self._blank(entry)
            if entry.name in ON_CPU and not self._on_device(entry.place):
                made = made.cpu()
            state[entry.name] = made.copy_(mean) if isinstance(mean, Tensor) else made.fill_(mean)


def _entry(place: int, name: str, value: Any) -> dict[Entry, Any]:
    if isinstance(value, Tensor):
        return {Entry(place, name, tuple(value.shape), str(value.dtype)): _dense(value)}
    return {Entry(place, name, None, type(value).__name__): value}


def _dense(value: Tensor) -> Tensor:
    """Momentum of sparse gradients is sparse until workers have met: each has it of other rows."""
    return value.detach().to_dense() if value.is_sparse else value.detach()


def _told(entry: Entry, value: Any) -> float:
    number = float(value)
    return math.log(max(number, 1e-300)) if entry.name in PRODUCTS else number


def without_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Of a placeholder there is nothing to apply, and without gradients no optimizer changes anything.

    Returns what `optimizer.step` is to be called with, where a closure would make gradients anew.
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
