"""The policies of the corpus: dynamix's own by name, and some that fail, cheat or learn faster than usual."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from dynamix_lab.suites.decisions.corpus import KEEN, QUICK, Array
from dynamix_lab.suites.decisions.revision import found


class Erratic:
    """What a guard is for. It answers nonsense, raises, or is worse or better than it seems, by the window's number."""

    def __init__(self, kind: str, clock: list[int]) -> None:
        self.kind, self.clock = kind, clock

    def decide(self, window: Any, bounds: Any) -> Any:
        sizes, t = window.batch_size.astype(np.float64), self.clock[0]
        if self.kind == "raises" and t % 11 in (3, 4):
            raise RuntimeError("out of order")
        if self.kind == "nonsense":
            wrong = {2: np.full_like(sizes, np.nan), 5: sizes[..., :0], 7: -sizes, 9: sizes * 2.0**50}
            sizes[..., 0] = np.where(t % 29 == 20, np.inf, sizes[..., 0])
            return wrong.get(t % 13, sizes)
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = sizes / window.compute
        speed = np.where(np.isfinite(speed) & (speed > 0), speed, 1.0)
        even = sizes.sum(-1, keepdims=True) * speed / speed.sum(-1, keepdims=True)
        worse = {"backwards": sizes[..., ::-1], "greedy": 1.15 * sizes + 1, "timid": 0.85 * sizes, "even": even}
        return worse.get(self.kind, sizes)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def make(name: str, clock: list[int]) -> Any:
    """A policy by name; beside dynamix's own: quick: and keen: (guards and learners of other settings), failing:,
    erratic:.
    """
    head, _, rest = name.partition(":")
    if head == "erratic":
        return Erratic(rest, clock)
    if head == "quick":
        return found("Guard")(make(rest, clock), **QUICK)
    if head == "guarded" and rest.startswith(("erratic:", "failing:")):
        return found("Guard")(make(rest, clock))
    if head == "keen":
        return found("LearningPolicy")(make(rest, clock), found("LiveConfig")(**KEEN), seed=5)
    if head == "failing":
        return _failing(make(rest, clock), clock)
    return found("make_policy")(name)


def _failing(policy: Any, clock: list[int]) -> Any:
    """`policy`, which raises now and then: before it looks at the window, or when its network is asked."""
    decide = policy.decide

    def first(window: Any, bounds: Any) -> Any:
        if clock[0] % 17 == 11:
            raise RuntimeError("out of order")
        return decide(window, bounds)

    def network(*_: Any) -> None:
        if clock[0] % 13 == 8:
            raise RuntimeError("no network")

    policy.decide = first
    policy.net.register_forward_pre_hook(network)
    return policy


def reloaded(policy: Any, name: str, clock: list[int]) -> Any:
    """A fresh policy with the state of `policy`, which went through JSON, or through torch's format where it holds
    tensors.
    """
    state, fresh = policy.state_dict(), make(name, clock)
    try:
        fresh.load_state_dict(json.loads(json.dumps(state)))
    except TypeError:
        import torch

        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def whose(policy: Any, shape: tuple[int, ...]) -> Array:
    """Whose answer a guard gave in each cluster and why, as a number; 0 without a guard."""
    reasons = ("trusted", "check", "worse", "refused", "fault")
    said: dict[str, Any] = {}
    while policy is not None and "reason" not in said:
        if (report := getattr(policy, "report", None)) is not None:
            said = report()
            said = said.get("guard", said)
        policy = getattr(policy, "policy", None)
    if "reason" not in said:
        return np.zeros(shape, dtype=np.uint8)
    by, reason = np.asarray(said["by"]).reshape(-1).tolist(), np.asarray(said["reason"]).reshape(-1).tolist()
    codes = [1 + 2 * reasons.index(why) + (who == "rule") for who, why in zip(by, reason, strict=True)]
    return np.asarray(codes, dtype=np.uint8).reshape(shape)
