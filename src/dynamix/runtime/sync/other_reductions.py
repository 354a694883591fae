"""Refuses code of torch that reduces or applies DDP's gradients without the controller's hook weighting them."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dynamix.errors import UsageError


def require_own_reduction(model: Any, weighting: str, *, apart: bool) -> None:
    """Raise `UsageError`, which names the code, if other code reduces or steps `model` under DDP.

    weighting   as in `Controller.wrap`
    apart       workers only average parameters
    """
    require_no_optimizers_in_backward(model)
    if model.mixed_precision is not None:
        does = "reduces gradients in a communication hook of its own, and DDP allows one"
        fix = "leave it out, and put the forward pass under torch.autocast"
        raise UsageError(f"DDP(mixed_precision=...) {does}: {fix}")
    if model._use_python_reducer and not apart:
        does = "reduces each gradient without DDP's buckets, where the controller's hook weighs them"
        fix = "make DDP with torch._dynamo.config.optimize_ddp = True, and leave compiled autograd out"
        raise UsageError(f'torch._dynamo.config.optimize_ddp = "python_reducer" {does}: {fix}')
    if model._delay_all_reduce_params and model.process_group.size() > 1 and (apart or weighting == "hook"):
        does = "reduces these parameters' gradients past the communication hook, so they would stay unweighted"
        raise UsageError(f"DDP(delay_all_reduce_named_params=...) {does}: leave it out")


def require_no_optimizers_in_backward(model: DistributedDataParallel) -> None:
    """Raise `UsageError` if torch applies its own optimizers in the backward pass of `model`."""
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        does = "makes DDP reduce and step in a communication hook of its own, and DDP allows one"
        fix = "leave it out, and call optimizer.step() in the loop"
        raise UsageError(f"_apply_optimizer_in_backward() {does}: {fix}")
