"""The boundary every policy implements."""

from typing import Any, Literal, Protocol, runtime_checkable

from dynamix.window import Bounds, Ints, Window


@runtime_checkable
class Policy(Protocol):
    """Anything with these three methods serves as a policy.

    `decide(window, bounds)` maps a window of shape (..., W) to batch sizes, int64 (..., W), that satisfy `bounds`
    (use `dynamix.project`). It may keep state between calls; `state_dict` and `load_state_dict` save it.
    An optional attribute `boundary`, "window" (default) or "epoch", says how often it wants to be asked. `even` = True
    says that it gives all workers the same, so that it has nothing to decide where the global batch is fixed;
    `adapts` = False, that it moves shares only, so that an adaptive global batch stays what it is.
    Optional methods, as of policies that wrap another, are named in `dynamix.policies.wrappers`. Windows and bounds are
    read-only.
    """

    def decide(self, window: Window, bounds: Bounds) -> Ints: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def boundary(policy: Policy) -> Literal["window", "epoch"]:
    """How often `policy` wants to be asked."""
    return "epoch" if getattr(policy, "boundary", "window") == "epoch" else "window"
