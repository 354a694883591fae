"""Why DDP has not reduced a pass's gradients: it waits for those of parameters that the pass did not reach.

Or the pass has not ended.
"""

from typing import Any

from torch import nn

from dynamix.errors import shown

_REPLACED = (
    "a layer was replaced after DDP was made, and DDP still waits for the gradients of the old one: replace layers "
    "first, then make DDP, the optimizer, and controller.wrap(model, optimizer)"
)

IN_BACKWARD = (
    "optimizer.step() is called inside of backward(), in a hook of a parameter or a module, before gradients are "
    "averaged over the ranks: remove the hook, and call optimizer.step() in the loop, after loss.backward()"
)


def replaced(model: nn.Module) -> str | None:
    """The message if DDP reduces parameters that its module no longer has; None if it does not."""
    reduced: list[nn.Parameter] = getattr(model, "_module_parameters", [])
    own = {id(p) for p in model.parameters()}
    return _REPLACED if any(p.requires_grad and id(p) not in own for p in reduced) else None


def unreached(model: Any) -> str | None:
    """The message if gradients exist that DDP has not reduced because others are missing; None if none is missing."""
    if (why := replaced(model)) is not None or model.find_unused_parameters:
        return why
    reduced = {id(p) for p in model._module_parameters}
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and id(p) in reduced]
    names = [name for name, p in named if p.grad is None]
    if not names or len(names) == len(named):
        return None
    do = "write DDP(net, find_unused_parameters=True)" + (" and no static_graph=True" if model.static_graph else "")
    told = f"the backward pass did not reach {shown(names)}, and DDP waits for the gradients of all parameters"
    return f"{told}: {do}, or freeze what the loss does not need, requires_grad_(False), before DDP is made"
