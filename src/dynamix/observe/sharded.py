"""Observes FSDP2 (`fully_shard`): its passes, and the moments when its shards cross ranks."""

from __future__ import annotations

import functools
from typing import Any

from dynamix.observe.never_fatal import never_fatal
from dynamix.observe.recorder import BACKWARD, EXCHANGE
from dynamix.startup.sitecustomize import after_import

# Called to gather parameters and to reduce gradients. On CPUs some of them wait; on a GPU the stream does.
EXCHANGES = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
_PACKAGE = "torch.distributed.fsdp._fully_shard"


def install(watch: Any) -> None:
    """Install the hooks when FSDP2 is imported. `watch` is the process's `hooks.Observer`."""
    after_import(f"{_PACKAGE}._fsdp_state", never_fatal(watch, functools.partial(passes, watch=watch)))
    after_import(f"{_PACKAGE}._fsdp_param_group", never_fatal(watch, functools.partial(exchanges, watch=watch)))


def passes(module: Any, watch: Any) -> None:
    """Hooks the passes of a root module: the outermost to which `fully_shard` was applied."""
    state = module.FSDPState
    pre_forward, post_forward, at_end = (
        getattr(state, name) for name in ("_root_pre_forward", "_post_forward", "_root_post_backward_final_callback")
    )
    begins, ended, mark = (
        never_fatal(watch, f) for f in (watch.forward_begins, watch.forward_ended, watch.mark_of_backward)
    )
    training = [False]

    @functools.wraps(pre_forward)
    def observed_pre_forward(self: Any, root: Any, args: Any, kwargs: Any) -> Any:
        if self._state_ctx is not None and self._state_ctx.iter_forward_root is None:
            training[0] = bool(begins("FSDP2", root, args, kwargs))
        return pre_forward(self, root, args, kwargs)

    @functools.wraps(post_forward)
    def observed_post_forward(self: Any, inner: Any, inputs: Any, output: Any) -> Any:
        is_root = self._state_ctx.iter_forward_root is self
        output = post_forward(self, inner, inputs, output)
        if is_root and training[0]:
            ended(output)
        return output

    @functools.wraps(at_end)
    def observed_end(self: Any) -> None:
        mark(BACKWARD)
        at_end(self)
        mark(EXCHANGE)

    state._root_pre_forward, state._post_forward = observed_pre_forward, observed_post_forward
    state._root_post_backward_final_callback = observed_end


def exchanges(module: Any, watch: Any) -> None:
    """Hooks the moments when a group's parameters are gathered, or its gradients reduced."""
    group, waits = module.FSDPParamGroup, never_fatal(watch, watch.waits)
    inside = [False]

    def observed(call: Any) -> Any:
        @functools.wraps(call)
        def exchanging(self: Any, *args: Any, **kwargs: Any) -> Any:
            over = None if inside[0] else waits()
            if over is None:
                return call(self, *args, **kwargs)
            inside[0] = True
            try:
                return call(self, *args, **kwargs)
            finally:
                inside[0] = False
                over()

        return exchanging

    for name in EXCHANGES:
        setattr(group, name, observed(getattr(group, name)))
