"""Guards any policy: if it fails or does worse than the goodput rule would, the rule takes over for a while.

One job model compares both answers: the policy's own if it has one. The decision is by a one-sided cumulative sum
(Page, Biometrika 1954) of what the policy's answers lose against the rule's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError
from dynamix.model import JobModel
from dynamix.model.measured import base_total
from dynamix.model.state import array_of
from dynamix.policies.fitted import FittedModel
from dynamix.policies.goodput import wish
from dynamix.policies.protocol import Policy, boundary
from dynamix.policies.stigmergic.policy import OF_0_2
from dynamix.policies.wrappers import pace_as_written_now, peers_of, report_of
from dynamix.projection import project
from dynamix.removed import removed_arguments
from dynamix.window import Bounds, Floats, Ints, Window

Flags = NDArray[np.bool_]
REASONS = ("trusted", "worse", "refused", "fault")
_TRUSTED, _WORSE, _REFUSED, _FAULT = range(len(REASONS))
_LARGEST = 2.0**40  # samples; a larger size is a fault


@dataclass(frozen=True, slots=True)
class GuardState:
    """A guard's memory after a decision: arrays (...), one value for each cluster.

    Never changed in place: `Guard` makes a new state for each step.
    """

    lost: Floats  # log goodput, summed since it was last 0
    rest: Floats  # windows for which the rule still decides
    next_rest: Floats  # windows for which the rule decides next time
    kept: Floats  # windows since the policy was last tried again
    falls: Floats  # how often the rule took over
    reason: Floats  # index of `REASONS`; unless it is "trusted", the rule's answer is in force

    @classmethod
    def of(cls, shape: tuple[int, ...], *, next_rest: float = 0.0) -> GuardState:
        """The initial state of clusters (...)."""
        known = {entry.name: np.full(shape, 0.0) for entry in fields(cls)}
        return cls(**{**known, "next_rest": np.full(shape, next_rest, dtype=np.float64)})


def as_written_now(state: dict[str, Any]) -> dict[str, Any]:
    """A policy's state in this version's format, converted from any version's."""
    if isinstance(inner := state.get("paced"), dict):
        return {**state, "paced": as_written_now(inner), "pace": pace_as_written_now(state.get("pace"))}
    if isinstance(state.get("smelt"), list):  # a stigmergic policy of 0.2, whose traces lasted for several windows
        habit = {**state["habit"], "usual": [], "rise": []}
        return {**state, "habit": habit, **dict.fromkeys(OF_0_2), "target": state["target"]}
    own = state.get("guard")
    if not isinstance(own, dict) or "check" not in own:
        return state
    kept = {entry.name: own[entry.name] for entry in fields(GuardState)}
    # 0.2 had one more reason, at 1: windows of an A/B comparison.
    kept["reason"] = np.maximum(np.asarray(own["reason"], np.float64) - 1.0, 0.0).tolist()
    return {**state, "guard": kept}


class Guard:
    """`policy`, as long as it is no worse than the goodput rule.

    The rule decides on the next window if the policy raises or answers no valid batch size. It also does if the fitted
    model rates the answer `veto` below the rule's (in log goodput: 0.7 is half). Otherwise the guard sums the rule's
    advantage over the policy's windows, less `margin` each. Above `patience`, and after a fault, the rule takes over
    for `rest` windows. This doubles each time, up to `longest`, and is reset if the policy then stays longer still.

    margin    log goodput a window by which the policy may always be worse
    patience  log goodput, summed, that it may lose before the rule takes over

    So by the model it loses at most about `patience` at first, half of that at each later try, and `margin` a window.
    Of N windows about log2 N are such tries. The guard cannot see what the model cannot see. Works on windows of any
    leading shape, each cluster separately; a policy that raises fails for all. Only answers are checked.

    >>> class Backwards:
    ...     def decide(self, window, bounds): return window.batch_size[..., ::-1]
    ...     def state_dict(self): return {}
    ...     def load_state_dict(self, state): pass
    >>> guard, bounds = Guard(Backwards()), Bounds.of(2)
    >>> sizes = guard.decide(Window.of([90, 10], compute=[0.09, 0.1], steps=5), bounds)
    >>> int(sizes[0]) > 80, guard.report()["guard"]["reason"]
    (True, 'refused')
    """

    guarded = True  # a guard around a guard would add nothing

    @removed_arguments(verify="nothing: the guard compares by the job model alone")
    def __init__(
        self,
        policy: Policy,
        *,
        margin: float = 0.05,
        patience: float = 1.0,
        veto: float = 0.7,
        rest: int = 10,
        longest: int = 400,
    ) -> None:
        if not (0 <= margin < veto and patience > 0 and 1 <= rest <= longest):
            given = (margin, patience, veto, rest, longest)
            allowed = "0 <= margin < veto, patience above 0, 1 <= rest <= longest"
            raise ConfigError("margin, patience, veto, rest, longest", given, allowed, "leave them out")
        self.policy, self.fitted = policy, FittedModel()
        self.margin, self.patience, self.veto = margin, patience, veto
        self.shortest, self.longest = rest, longest
        self.error: str | None = None  # message of the policy's last fault
        self.state = GuardState.of((0,))

    @property
    def boundary(self) -> Literal["window", "epoch"]:
        """How often the policy wants to be asked."""
        return boundary(self.policy)

    @property
    def model(self) -> JobModel:
        """The job model after the last window: the policy's own, if it decides by one."""
        return self.fitted.now

    def fit_model(self, window: Window) -> JobModel:
        """Take in `window` before `decide`; returns the job model after it."""
        return self.fitted.take_in(window, self.policy)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        model = self.fitted.to_decide(window, self.fit_model)
        wished, faulty = self._ask(window, bounds)
        own = wish(model, window, bounds)
        # Without a noise scale the rule would keep any global batch, even one that a policy has chosen.
        total = np.where(model.guided, own.sum(-1), base_total(window))
        rules = project(own, bounds, total=total, current=window.batch_size)
        if self.state.lost.shape != faulty.shape:
            self.state = GuardState.of(faulty.shape, next_rest=self.shortest)
        of_rule, of_wish = model.log_goodput(np.stack([rules, wished]), costs="full", unknown="base")
        gain = of_rule - of_wish
        self.state = self._next(faulty, np.where(np.isnan(gain), 0.0, gain))
        return np.where((self.state.reason != _TRUSTED)[..., None], rules, wished)

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        """The policy's own report, and the last decision as `guard`: plain values, lists for leading dimensions.

        asked   whether that decision was about the window reported on; docs/run-folder.md explains the values
        """
        about, state = report_of(self.policy, asked=asked), self.state
        if not asked:
            return about
        decision = {
            "by": np.where(state.reason != _TRUSTED, "rule", "policy").tolist(),
            "reason": np.asarray(REASONS)[state.reason.astype(np.int64)].tolist(),
            "lost": np.round(state.lost, 4).tolist(),
            "rest_windows": state.rest.astype(np.int64).tolist(),
            "falls": state.falls.astype(np.int64).tolist(),
            "error": self.error,
        }
        return {**about, "guard": decision}

    def peers(self) -> Any:
        """None. Raises `ConfigError` if the policy's workers would each decide for themselves."""
        if peers_of(self.policy) is not None:
            fix = "leave guard out: a guard sees all workers' times"
            raise ConfigError("guard", True, "False or None with the stigmergic policy", fix)

    def state_dict(self) -> dict[str, Any]:
        own = {e.name: np.asarray(getattr(self.state, e.name), np.float64).tolist() for e in fields(GuardState)}
        return {"guarded": self.policy.state_dict(), "model": self.fitted.state_dict(self.policy), "guard": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. If the policy was saved without a guard, the guard starts anew."""
        if "guarded" not in state:
            self.policy.load_state_dict(state)
            return
        self.policy.load_state_dict(state["guarded"])
        self.fitted.load_state_dict(state)
        own = as_written_now(state)["guard"]
        self.state = GuardState(**{entry.name: array_of(own[entry.name]) for entry in fields(GuardState)})

    def _ask(self, window: Window, bounds: Bounds) -> tuple[Ints, Flags]:
        """The policy's answer, projected, and in which clusters (...) it is missing."""
        shape = window.batch_size.shape
        try:
            wish = np.asarray(self.policy.decide(window, bounds), dtype=np.float64)
            why = f"answered sizes of shape {wish.shape}" if wish.shape != shape else "answered what is no batch size"
        except Exception as error:  # training can go on without this policy, whatever it raised
            wish, why = np.empty(0), f"failed: {error!r}"
        faulty = np.ones(shape[:-1], dtype=bool)
        if wish.shape == shape:
            faulty = np.asarray(~((wish >= 0) & (wish < _LARGEST)).all(-1))
        if faulty.any():
            if self.error is None:
                warnings.warn(f"the policy {why}; the goodput rule takes over", RuntimeWarning, stacklevel=3)
            self.error = why
        usable = wish if wish.shape == shape else window.batch_size
        safe = np.where(faulty[..., None], window.batch_size, usable)
        return project(safe, bounds, current=window.batch_size), faulty

    def _next(self, faulty: Flags, gain: Floats) -> GuardState:
        """The next state (...): who decides on the next window, and every counter after this one.

        gain   log goodput by which the rule's answer is better than the policy's
        """
        old, trying, refused = self.state, self.state.rest == 0, gain > self.veto
        # A rejected answer loses nothing: it never takes effect.
        more = np.maximum(0.0, old.lost + gain - self.margin)
        lost = np.where(trying & ~refused & ~faulty, more, old.lost)
        fall = trying & (faulty | (lost > self.patience))
        # The rule takes over for longer each time, unless the policy stayed long.
        next_rest = np.where(old.kept > 2 * old.next_rest, self.shortest, old.next_rest)
        rest = np.where(fall, next_rest, old.rest)
        resting = rest > 0
        why = np.where(faulty, _FAULT, _WORSE)
        return GuardState(
            # The next try begins on probation: half of the patience is gone.
            lost=np.where(fall, self.patience / 2, lost),
            rest=np.where(resting, rest - 1, rest),
            next_rest=np.where(fall, np.minimum(2 * next_rest, self.longest), next_rest),
            kept=np.where(resting, 0.0, old.kept + 1),
            falls=old.falls + fall,
            reason=np.where(fall, why, np.where(resting, old.reason, np.where(refused, _REFUSED, _TRUSTED))).astype(
                np.float64
            ),
        )
