"""The boundary every policy implements."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from dynamix.window import Bounds, Ints, Window


@runtime_checkable
class Policy(Protocol):
    """Anything with these three methods serves as a policy.

    `decide(window, bounds)` maps a window of shape (..., W) to batch sizes, int64 (..., W), that satisfy `bounds`
    (use `dynamix.window.project`). It may keep state between calls; `state_dict` and `load_state_dict` save it.
    An optional attribute `boundary`, "window" (default) or "epoch", says how often it wants to be asked.
    """

    def decide(self, window: Window, bounds: Bounds) -> Ints: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def boundary(policy: Policy) -> Literal["window", "epoch"]:
    """How often `policy` wants to be asked."""
    return "epoch" if getattr(policy, "boundary", "window") == "epoch" else "window"


_Part = TypeVar("_Part")


def part_of(policy: object, kind: type[_Part]) -> _Part | None:
    """The policy itself, or what it wraps (attribute `policy`), if that is a `kind`; None if nothing is."""
    while policy is not None and not isinstance(policy, kind):
        policy = getattr(policy, "policy", None)
    return policy
