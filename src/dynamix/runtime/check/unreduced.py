"""Trainable parameters that an optimizer steps and whose gradients no model reduces: do ranks part by them?"""

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

# Two ranks' own gradients are further apart than so much of the larger one; gradients that a loop has added over unlike
# devices are not.
ALIKE = 3e-2
_FIX = (
    "freeze, replace and add layers before you call {made}, and give the optimizer only parameters of that model. If "
    "your loop averages these gradients itself, do it before the next optimizer.step(). If the parameters must differ "
    "by rank, give them an optimizer of their own, and do not give that one to wrap()"
)


class Unreduced:
    """Those of one optimizer. A loop may add their gradients itself, so what is compared is how they move.

    gather   (told, what) to what every rank tells in the collective call `what`: plain objects
    shards   what FSDP2 holds of the model
    """

    def __init__(self, model: nn.Module, gather: Callable[[Any, str], list[Any]], shards: Shards | None) -> None:
        self._model = weakref.ref(model)  # whoever keeps this is kept by DDP, in C++
        self._gather, self._sharded = gather, shards is not None
        # Names of parameters that DDP or FSDP was told to leave alone: they may be each rank's own.
        self._left: Collection[str] = getattr(model, "parameters_to_ignore", ())
        if shards is not None:
            held = {id(p) for p in shards.parameters()}
            self._left = [name for name, p in model.named_parameters() if id(p) not in held]
        self._parameters: list[nn.Parameter] = []
        self._steps = 0  # of the optimizer, with these
        self._before: list[Tensor] = []  # what they were at the last step, if that is to be compared

    def look(self, parameters: list[nn.Parameter]) -> str | None:
        """The optimizer is about to step these: what is wrong with them, None if nothing is.

        After a change, the first, second, fourth step and so on are compared, each when the next one begins: one may
        get its first gradient late. A collective call then, which asks the device.
        """
        wrong = self._compare() if self._before else None
        if len(parameters) != len(self._parameters) or any(map(operator.is_not, parameters, self._parameters)):
            self._parameters, self._steps = parameters, 0
        self._steps += 1
        due = self._steps & (self._steps - 1) == 0
        self._before = [p.detach().clone() for p in parameters] if due else []
        return wrong

    def names(self, parameters: set[int]) -> list[str]:
        """Those of the model among `parameters`, by `id`, that train and that somebody was expected to reduce."""
        return [name for name, p in self._named() if id(p) in parameters and p.requires_grad and name not in self._left]

    def _compare(self) -> str | None:
        known = {id(p): name for name, p in self._named()}
        told: dict[str, tuple[list[float], list[float]]] = {}
        for number, (parameter, before) in enumerate(zip(self._parameters, self._before, strict=True)):
            name = known.get(id(parameter), f"parameter {number} beside the model, of shape {list(parameter.shape)}")
            if sums(before):
                told[name] = sketch(before).tolist(), sketch(parameter.detach() - before).tolist()
        every = self._gather(told, f"optimizer.step() of {next(iter(told), 'nothing')}, which is not reduced")
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
        """Whether ranks move this parameter away from each other."""
        if not all(name in of for of in every):
            return True
        values, moves = zip(*(of[name] for of in every), strict=True)
        norms = [norm for *_, norm in moves]
        if not any(norms) or not all(map(math.isfinite, norms)):
            return False  # it has no gradient yet, or training has failed
        alike = _near(values, NEAR)
        if name in self._left and not alike:
            return False  # each rank's own
        return not (alike and _near(moves, ALIKE))


def _near(sketches: Sketches, tolerance: float) -> bool:
    *sums, norms = zip(*sketches, strict=True)
    return all(max(of) - min(of) <= tolerance * max(norms) for of in (*sums, norms))
