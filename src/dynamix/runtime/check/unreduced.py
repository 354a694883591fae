"""Finds trainable parameters that an optimizer steps, no model reduces, and whose values diverge between ranks."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from dynamix.runtime.ranks.compare import NEAR, sketch, sums
from dynamix.runtime.sync.shards import Shards

Sketches = Sequence[Sequence[float]]  # of one tensor, on every rank

# The difference, relative to the larger one, from which two ranks' gradients count as different. Separate gradients
# exceed it; gradients that a loop has summed over unlike devices do not.
ALIKE = 3e-2
_FIX = (
    "freeze, replace and add layers before you call {made}, and give the optimizer only parameters of that model. If "
    "your loop averages these gradients itself, do it before the next optimizer.step(). If the parameters must differ "
    "by rank, give them an optimizer of their own, and do not give that one to wrap()"
)


class Unreduced:
    """Such parameters of one optimizer. A loop may sum their gradients itself, so ranks compare how values change.

    gather   (value, name): collective call `name` that returns every rank's value, a plain object
    shards   FSDP2's state of the model
    """

    def __init__(self, model: nn.Module, gather: Callable[[Any, str], list[Any]], shards: Shards | None) -> None:
        self._model = weakref.ref(model)  # weak, because DDP keeps the holder of this object in C++
        self._gather, self._sharded = gather, shards is not None
        # Names of parameters that DDP or FSDP is configured to ignore: they may differ by rank.
        self._left: Collection[str] = getattr(model, "parameters_to_ignore", ())
        if shards is not None:
            held = {id(p) for p in shards.parameters()}
            self._left = [name for name, p in model.named_parameters() if id(p) not in held]
        self._parameters: list[nn.Parameter] = []
        self._steps = 0  # optimizer steps with these
        self._before: list[Tensor] = []  # their values before the last step, if that step is to be compared

    def look(self, parameters: list[nn.Parameter]) -> str | None:
        """The optimizer is about to step these: returns the message if something is wrong, else None.

        After the parameters change, steps 1, 2, 4, 8 and so on are compared, each when the next begins: some may get
        their first gradient late. Such a call is collective, and reads from the device.
        """
        wrong = self._compare() if self._before else None
        if len(parameters) != len(self._parameters) or any(map(operator.is_not, parameters, self._parameters)):
            self._parameters, self._steps = parameters, 0
        self._steps += 1
        due = self._steps & (self._steps - 1) == 0
        self._before = [p.detach().clone() for p in parameters] if due else []
        return wrong

    def names(self, parameters: set[int]) -> list[str]:
        """Names of the model's trainable parameters among `parameters` (`id`) that DDP or FSDP should have reduced."""
        return [name for name, p in self._named() if id(p) in parameters and p.requires_grad and name not in self._left]

    def _compare(self) -> str | None:
        known = {id(p): name for name, p in self._named()}
        told: dict[str, tuple[list[float], list[float]]] = {}
        for number, (parameter, before) in enumerate(zip(self._parameters, self._before, strict=True)):
            name = known.get(id(parameter), f"parameter {number} beside the model, of shape {list(parameter.shape)}")
            if sums(before):
                told[name] = sketch(before).tolist(), sketch(parameter.detach() - before).tolist()
        every = self._gather(told, f"optimizer.step() of unreduced {next(iter(told), 'nothing')}")
        apart = [name for name in dict.fromkeys(name for of in every for name in of) if self._part(name, every)]
        if not apart:
            return None
        named = f"{', '.join(apart[:3])}{' and others' if len(apart) > 3 else ''}"
        whose, made = ("FSDP", "fully_shard(net)") if self._sharded else ("DDP", "DistributedDataParallel(net)")
        why = f"the optimizer trains {named}, but {whose} does not average the gradients, so ranks would differ"
        return f"{why}: {_FIX.format(made=made)}"

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        model = self._model()
        return [] if model is None else [*getattr(model, "module", model).named_parameters()]

    def _part(self, name: str, every: list[dict[str, tuple[list[float], list[float]]]]) -> bool:
        """Whether this parameter diverges between ranks."""
        if not all(name in of for of in every):
            return True
        values, moves = zip(*(of[name] for of in every), strict=True)
        norms = [norm for *_, norm in moves]
        if not any(norms) or not all(map(math.isfinite, norms)):
            return False  # it has no gradient yet, or training has failed
        alike = _near(values, NEAR)
        if name in self._left and not alike:
            return False  # ranks may have their own values
        return not (alike and _near(moves, ALIKE))


def _near(sketches: Sketches, tolerance: float) -> bool:
    *sums, norms = zip(*sketches, strict=True)
    return all(max(of) - min(of) <= tolerance * max(norms) for of in (*sums, norms))
