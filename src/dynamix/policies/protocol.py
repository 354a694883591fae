"""The boundary every policy implements, and the register that finds one by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from dynamix.errors import ConfigError
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


# name -> "module:factory"; imported on first use, so that `import dynamix` stays light.
_REGISTER = {
    "static": "dynamix.policies.static:Static",
    "dbs": "dynamix.policies.proportional:DBS",
    "lb_bsp": "dynamix.policies.proportional:LBBSP",
    "noise_scale": "dynamix.policies.noise_scale:NoiseScalePolicy",
    "pollux": "dynamix.policies.pollux:Pollux",
    "cannikin": "dynamix.policies.cannikin:Cannikin",
    "goodput": "dynamix.policies.goodput:Goodput",
    "dynamix": "dynamix.policies.learned.policy:pretrained",
    "dynamix-paper": "dynamix.policies.learned.additive:pretrained",
    "stigmergic": "dynamix.policies.stigmergic.policy:pretrained",
}


def policy_names() -> list[str]:
    """Names that `make_policy` and `Controller(policy=...)` accept."""
    return sorted(_REGISTER)


def make_policy(name: str, **options: Any) -> Policy:
    """A fresh policy by name, or the learned policy of either form in a file (`path/to/policy.safetensors`).

    `static:256` is 256 samples for every worker, whatever the base batch; `guarded:NAME` is that policy, watched (`Guard`);
    `learning:NAME` goes on learning on its one job (`LearningPolicy`).

    Raises `ConfigError` for an unknown name and `PolicyFileError` for a file that cannot be trusted.

    >>> make_policy("nonsense")
    Traceback (most recent call last):
        ...
    dynamix.errors.ConfigError: policy='nonsense' is not possible: allowed is cannikin, dbs, dynamix, dynamix-paper, goodput, lb_bsp, noise_scale, pollux, static, stigmergic, static:SIZE, or a .safetensors file; check the spelling
    """
    if name.startswith("guarded:"):
        from dynamix.policies.guard import Guard

        return Guard(make_policy(name.removeprefix("guarded:"), **options))
    if name.startswith("learning:"):
        from dynamix.policies.learned.online import learning

        inner = name.removeprefix("learning:")
        if inner.startswith("guarded:"):
            bare = inner.removeprefix("guarded:")
            raise ConfigError("policy", name, f"guarded:learning:{bare}", "a guard watches from outside what learns")
        return learning(make_policy(inner, **options), True)
    if name.endswith(".safetensors"):
        from dynamix.policies.files import kind_of
        from dynamix.policies.learned import additive
        from dynamix.policies.learned.policy import LearnedPolicy
        from dynamix.policies.stigmergic import policy as stigmergic

        kinds: dict[str, Any] = {additive.KIND: additive.AdditivePolicy, stigmergic.KIND: stigmergic.StigmergicPolicy}
        loaded: Policy = kinds.get(kind_of(name) or "", LearnedPolicy).load(name, **options)
        return loaded
    if name.startswith("static:") and name[7:].isdecimal():
        name, options = "static", {"batch_size": int(name[7:]), **options}
    if name not in _REGISTER:
        allowed = ", ".join(policy_names()) + ", static:SIZE, or a .safetensors file"
        raise ConfigError("policy", name, allowed, "check the spelling")
    module, _, attribute = _REGISTER[name].partition(":")
    factory: Callable[..., Policy] = getattr(importlib.import_module(module), attribute)
    return factory(**options)


def boundary(policy: Policy) -> Literal["window", "epoch"]:
    """How often `policy` wants to be asked."""
    return "epoch" if getattr(policy, "boundary", "window") == "epoch" else "window"


_Part = TypeVar("_Part")


def part_of(policy: object, kind: type[_Part]) -> _Part | None:
    """The policy itself, or what it wraps (attribute `policy`), if that is a `kind`; None if nothing is."""
    while policy is not None and not isinstance(policy, kind):
        policy = getattr(policy, "policy", None)
    return policy
