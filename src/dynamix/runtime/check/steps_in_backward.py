"""Optimizers that step inside of a backward pass, where DDP has not reduced yet what they apply.

Such a step is in a hook of a parameter or of a module. Not every one is wrong: a gradient may be of an earlier pass,
or may have crossed ranks in the communication hook that steps. So hooks of our own note in which pass each gradient
is made. A model has them from the start if its parameters have hooks that may step, else after the first such step.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.runtime.sync.gradients import GradientHook

WHY = (
    "optimizer.step() is called inside of backward(), in a hook of a parameter or a module, where gradients have not "
    "crossed ranks yet: remove the hook, and call optimizer.step() in the loop, after loss.backward()"
)


class GradientPasses:
    """In which backward pass the gradients of connected models were made last, as far as that must be known."""

    def __init__(self) -> None:
        self._parameters = dict[int, nn.Parameter]()  # those that DDP reduces, by `id`
        self._made = dict[int, int]()  # the number of the pass, by `id` of those that are watched

    def connect(self, model: Any) -> None:
        """A model under DDP is connected."""
        reduced = {id(p): p for p in model._module_parameters if p.requires_grad}
        self._parameters |= reduced
        if any(p._post_accumulate_grad_hooks for p in reduced.values()):
            for parameter in reduced.values():
                self._watch(parameter)

    def unreduced(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` has gradients of the pass that this thread is in, outside of the communication hook."""
        if _in_communication_hook():
            return False
        now: int = torch._C._current_graph_task_id()
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters]
        found = any(self._made.get(id(p)) == now for p in own)
        for parameter in own:
            self._watch(parameter)
        return found

    def _watch(self, parameter: nn.Parameter) -> None:
        made, of = self._made, id(parameter)
        if of not in made:
            made[of] = -1

            def note(gradient: Tensor) -> None:
                made[of] = torch._C._current_graph_task_id()

            parameter.register_hook(note)


def _in_communication_hook() -> bool:
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        if outer.f_code is GradientHook.__call__.__code__:
            return True
        frame = outer
    return False
