"""The interface of every policy."""

from typing import Any, Literal, Protocol, runtime_checkable

from dynamix.window import Bounds, Ints, Window


@runtime_checkable
class Policy(Protocol):
    """Anything with these three methods serves as a policy.

    `decide(window, bounds)` maps a window of shape (..., W) to batch sizes, int64 (..., W), that satisfy `bounds`
    (use `dynamix.project`). It may keep state between calls; `state_dict` and `load_state_dict` save it.
    Optional attributes: `boundary`, "window" (default) or "epoch", says how often it wants to be asked. `even` = True
    says that it gives all workers the same size, so it decides nothing if the global batch is fixed.
    `adapts` = False says that it changes only shares, so an adaptive global batch stays as it is.
    `dynamix.policies.wrappers` lists optional methods, such as those of policies that wrap another. Windows and bounds
    are read-only.
    """

    def decide(self, window: Window, bounds: Bounds) -> Ints: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def boundary(policy: Policy) -> Literal["window", "epoch"]:
    """How often `policy` wants to be asked."""
    return "epoch" if getattr(policy, "boundary", "window") == "epoch" else "window"
