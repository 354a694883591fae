"""Policies that take turns in one job, so that its windows show how fast each of them is compared with the first.

With a fixed global batch a policy changes only shares, so training is mathematically the same in every turn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies.protocol import Policy, boundary
from dynamix.policies.registry import make_policy
from dynamix.policies.static import Static
from dynamix.policies.wrappers import load_policy, peers_of
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window

WINDOW = 5  # optimizer steps
TURN = 2  # windows; the first is not counted, because sizes have just changed
LEARNING = 2  # blocks at the start that are not counted, because policies are still learning the job
WHOLE_RUNS = "compare whole runs: one of each on your cluster, or `dynamix emulate SCENARIO --compare ROWS -- COMMAND`"
_SUFFIXES = ("adaptive", "auto")  # of rows in a comparison of whole runs


class Alternating:
    """`policies` by name, in turns. A block has one turn of each, in an order that is drawn anew for every block.

    A policy sees only its own windows, and continues with the sizes that it answered last. Seconds a sample hold for
    the size at which they were measured, so a rule that sees the windows of others decides worse than alone. All begin
    with even shares, which `static` keeps. If an answer came late, a window has other sizes than those asked for, and
    counts for no policy.

    Raises `ConfigError` for fewer than two policies, and for those that cannot take turns.

    >>> turns = by_names("static,lb_bsp")
    >>> sizes = turns.decide(Window.of([32, 32], compute=[1.0, 3.0]), Bounds.of(2))
    >>> turns.report(asked=True)["compare"]["of"], sizes.tolist() in ([32, 32], [48, 16])
    (['static', 'lb_bsp'], True)
    """

    alternates = begins_anew = True
    adapts = False
    window_length = WINDOW

    def __init__(self, policies: Mapping[str, Policy], *, seed: int = 0) -> None:
        if len(policies) < 2:
            raise ConfigError("policies", list(policies), "two or more", "write static,lb_bsp,goodput")
        for name, policy in policies.items():
            _require_turns(name, policy)
        self.policies, self._seed = dict(policies), seed
        self._windows = 0  # that counted for a policy
        self._sizes: dict[str, list[int]] = {}  # last answer of each policy
        self._told: dict[str, Any] = {}  # report on the last window decided on

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        now: list[int] = window.batch_size.tolist()
        if any(len(sizes) != len(now) for sizes in self._sizes.values()) or not self._sizes:
            even = Static(anew=True).decide(window, bounds).tolist()
            self._sizes, self._windows = dict.fromkeys(self.policies, even), 0
        (name, block, of_turn), self._told = self._turn(), {}
        if now == self._sizes[name]:
            answer = self.policies[name].decide(window, bounds)
            self._sizes[name] = project(answer, bounds, current=window.batch_size).tolist()
            counts = block >= LEARNING and of_turn > 0
            self._told = {"of": list(self.policies), "turn": name, "block": block, "counts": counts}
            self._windows += 1
            name, *_ = self._turn()
        self._sizes[name] = project(self._sizes[name], bounds).tolist()  # bounds may have become narrower
        return np.asarray(self._sizes[name], dtype=np.int64)

    def report(self, *, asked: bool) -> dict[str, Any]:
        """As `compare`: which policy decided on the window, in which block, and whether it counts."""
        return {"compare": self._told} if asked and self._told else {}

    def state_dict(self) -> dict[str, Any]:
        compared = {name: policy.state_dict() for name, policy in self.policies.items()}
        return {"compared": compared, "turns": {"windows": self._windows, "sizes": dict(self._sizes)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        turns = state["turns"]
        for name, policy in self.policies.items():
            load_policy(policy, state["compared"][name])
        self._windows = int(turns["windows"])
        self._sizes = {name: [int(size) for size in turns["sizes"][name]] for name in self.policies if turns["sizes"]}

    def _turn(self) -> tuple[str, int, int]:
        """The policy, the block, and the window's place in the turn, of the open window."""
        turn, of_turn = divmod(self._windows, TURN)
        block, place = divmod(turn, len(self.policies))
        order = random.Random(f"{self._seed} {block}").sample(list(self.policies), len(self.policies))
        return order[place], block, of_turn


def by_names(names: str) -> Alternating:
    """The policies of these names, comma-separated. Learned ones are guarded, as in a job of their own.

    >>> list(by_names("static,static").policies)
    ['static', 'static (2)']
    """
    policies: dict[str, Policy] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if name == "local" or name.rpartition(":")[2] in _SUFFIXES:
            allowed = "a policy that moves shares of a fixed global batch: others change the training, too"
            raise ConfigError("policies", name, allowed, WHOLE_RUNS)
        again = sum(known.partition(" (")[0] == name for known in policies)
        policy = make_policy(name)
        if getattr(policy, "net", None) is not None and not getattr(policy, "guarded", False):
            policy = make_policy(f"guarded:{name}")
        policies[f"{name} ({again + 1})" if again else name] = policy
    return Alternating(policies)


def _require_turns(name: str, policy: Policy) -> None:
    """Raise `ConfigError` for a policy that does not decide window by window, in one place."""
    if peers_of(policy) is not None:
        why = "each worker decides for itself"
    elif boundary(policy) == "epoch":
        why = "it decides once an epoch"
    elif getattr(policy, "even", False):
        why = "it moves the global batch alone, which is fixed here"
    elif getattr(policy, "alternates", False):
        why = "it is a comparison itself"
    else:
        return
    allowed = f"policies that decide after every window, in one place ({name}: {why})"
    raise ConfigError("policies", name, allowed, f"leave it out, or {WHOLE_RUNS}")
