"""A watch over any policy: where it does worse than the goodput rule would, or fails, the rule takes over for a while.

The rule's answer and the policy's are compared by one job model, the policy's own if it decides by one. How much better
the rule's would have been is predicted by it, and the prediction is checked against what the job really achieved each
time the allocation passes from one of the two to the other. A one-sided cumulative sum (Page, Biometrika 1954) of what
the policy lost decides.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
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
from dynamix.policies.wrappers import after_answer, carry_over, peers_of, report_of
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

Flags = NDArray[np.bool_]
REASONS = ("trusted", "check", "worse", "refused", "fault")
_TRUSTED, _CHECK, _WORSE, _REFUSED, _FAULT = range(len(REASONS))
_LARGEST = 2.0**40  # samples; more is no batch size but a fault
# A comparison of two windows also sees what the cluster did between them: at most `_CLIP` of it counts, an older one
# counts 0.9 times a newer, and beforehand one is believed that agreed with the prediction, errors being about `_NOISE`.
_CLIP, _FORGET, _PRIOR, _NOISE, _ENOUGH = 0.3, 0.9, 1.0, 0.05, 3.0
_FOLLOW = 0.3  # weight of a window in the smoothed advantage


@dataclass(frozen=True, slots=True)
class GuardState:
    """What a guard knows after a decision: arrays (...), one value for each cluster; whether something is so as 0 or 1.

    `Guard` steps from one state to the next and writes to none.
    """

    lost: Floats  # log goodput, summed, since it was last 0
    lead: Floats  # predicted advantage of the rule, smoothed
    rest: Floats  # windows that are still the rule's
    next_rest: Floats  # how many it takes over for the next time
    kept: Floats  # windows since the policy was last tried again
    check: Floats  # windows left of an A/B comparison; the even ones are the rule's
    verifying: Floats  # whether that comparison is to decide
    since: Floats  # windows since the rule's last
    every: Floats  # and how many until the next comparison
    comparing: Floats  # whether the allocation in force came from the other of the two
    comparisons: Floats  # how many such windows were compared with the one before
    surprise: Floats  # sum over them of how much better than predicted the rule did
    squares: Floats  # sum of its squares
    falls: Floats  # how often the rule took over
    by_rule: Floats  # whose the allocation in force is
    reason: Floats  # index of `REASONS`
    value: Floats  # log goodput of the last window
    expected: Floats  # change of it that was predicted for the allocation in force
    answer: Floats  # (..., W) that allocation, and the two it was chosen from
    rules: Floats
    wishes: Floats

    @classmethod
    def of(cls, shape: tuple[int, ...], *, next_rest: float = 0.0, every: float = 0.0) -> GuardState:
        """Nothing known of workers (..., W)."""
        of_clusters = {"next_rest": next_rest, "every": every, "value": np.nan}
        known = {
            entry.name: np.full(shape[:-1], of_clusters.get(entry.name, 0.0), dtype=np.float64) for entry in fields(cls)
        }
        return cls(**{**known, **dict.fromkeys(("answer", "rules", "wishes"), np.full(shape, -1.0))})

    @property
    def correction(self) -> Floats:
        """Log goodput (...) by which the rule did better than predicted where the two were compared, shrunk.

        Where it speaks for the rule it is less its standard error: clusters change between windows, and a good policy
        must not pay for that. Where it speaks for the policy it is not: what the rule predicts of itself is rosy.
        """
        weight = self.comparisons + _PRIOR
        mean = self.surprise / weight
        error = np.sqrt((self.squares + _PRIOR * _NOISE**2) / weight / np.maximum(self.comparisons, 1.0))
        return np.where(mean > 0, np.maximum(mean - error, 0.0), mean)


class Guard:
    """`policy`, as long as it is no worse than the goodput rule.

    The next window is the rule's where the fitted model calls the policy's answer `veto` worse than the rule's (in log
    goodput: 0.7 is half), where that is no batch size, and where the policy raises. Otherwise the rule's advantage is
    added up over the policy's windows, less `margin` each; beyond `patience` an A/B comparison (rule, policy, rule,
    policy) is made, unless earlier ones suffice, and if it agrees the rule takes over for `rest` windows: twice as long
    each time, up to `longest`, forgiven by a stay that is longer still. After `verify` windows, and then ever less
    often while all is well, one window is the rule's in any case, to learn what the model cannot see.

    margin    log goodput a window that the policy may be worse for ever
    patience  log goodput, summed, that it may lose before the rule takes over

    So it loses at most about `patience` and three windows of `veto` at first, a window or two at every later try, of
    which there are log2 of the number of windows, and `margin` beyond. Works on windows of any leading shape, each
    cluster for itself; a policy that raises fails for all of them. A policy that may do anything else than answer is
    not held.

    >>> class Backwards:
    ...     def decide(self, window, bounds): return window.batch_size[..., ::-1]
    ...     def state_dict(self): return {}
    ...     def load_state_dict(self, state): pass
    >>> guard, bounds = Guard(Backwards()), Bounds.of(2)
    >>> sizes = guard.decide(Window.of([90, 10], compute=[0.09, 0.1], steps=5), bounds)
    >>> int(sizes[0]) > 80, guard.report()["guard"]["reason"]
    (True, 'refused')
    """

    guarded = True  # a watch over a watch would see nothing new

    def __init__(
        self,
        policy: Policy,
        *,
        margin: float = 0.02,
        patience: float = 0.5,
        veto: float = 0.7,
        verify: int = 50,
        rest: int = 10,
        longest: int = 400,
    ) -> None:
        if not (0 <= margin < veto and patience > 0 and verify >= 2 and 1 <= rest <= longest):
            given = (margin, patience, veto, verify, rest, longest)
            allowed = "0 <= margin < veto, patience above 0, verify 2 or more, 1 <= rest <= longest"
            raise ConfigError("margin, patience, veto, verify, rest, longest", given, allowed, "leave them out")
        self.policy, self.fitted = policy, FittedModel()
        self.margin, self.patience, self.veto = margin, patience, veto
        self.verify, self.shortest, self.longest = verify, rest, longest
        self.error: str | None = None  # what the policy's last fault was
        self.state = GuardState.of((0, 0))

    @property
    def boundary(self) -> Literal["window", "epoch"]:
        """How often the policy wants to be asked."""
        return boundary(self.policy)

    @property
    def learns_by(self) -> Any:
        """The policy's, if it learns."""
        return getattr(self.policy, "learns_by", None)

    @property
    def model(self) -> JobModel:
        """The job model after the last window: the policy's own, if it decides by one."""
        return self.fitted.now

    def fit_model(self, window: Window) -> JobModel:
        """Take in `window` ahead of `decide`; the job model after it."""
        return self.fitted.take_in(window, self.policy)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        model = self.fitted.to_decide(window, self.fit_model)
        wished, faulty = self._ask(window, bounds)
        own = wish(model, window, bounds)
        # Without a noise scale the rule keeps any global batch, also one that a policy brought it to.
        total = np.where(model.guided, own.sum(-1), base_total(window))
        rules = project(own, bounds, total=total, current=window.batch_size)
        if self.state.answer.shape != wished.shape:
            self.state = GuardState.of(wished.shape, next_rest=self.shortest, every=self.verify)
        candidates = np.stack([rules, wished, window.batch_size, self.state.rules, self.state.wishes])
        values = model.log_goodput(candidates, costs="full", unknown="base")
        of_rule, of_wish, of_present, of_last_rule, of_last_wish = values
        state, gain = self._learned(window, of_last_rule - of_last_wish), of_rule - of_wish
        # Where the policy proved better than predicted, it may also look worse.
        advantage = np.where(np.isnan(gain), 0.0, gain) + np.minimum(state.correction, 0.0)
        refused, differ = np.asarray(advantage > self.veto), np.asarray((rules != wished).any(-1))
        state = self._chosen(state, faulty, refused, differ & np.isfinite(state.value))
        by_rule = state.by_rule > 0
        answer = np.where(by_rule[..., None], rules, wished)
        self.state = replace(
            state,
            expected=np.where(by_rule, of_rule, of_wish) - of_present,
            answer=answer.astype(np.float64),
            rules=rules.astype(np.float64),
            wishes=np.where(faulty[..., None], rules, wished).astype(np.float64),
        )
        return answer

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        """The policy's own report, and as `guard` the last decision as plain values, lists for leading dimensions.

        asked   whether that decision was about the window reported on; docs/run-folder.md says what the values mean
        """
        about, state = report_of(self.policy, asked=asked), self.state
        if not asked:
            return about
        decision = {
            "by": np.where(state.by_rule > 0, "rule", "policy").tolist(),
            "reason": np.asarray(REASONS)[state.reason.astype(np.int64)].tolist(),
            "rule_advantage": np.round(state.lead + state.correction, 4).tolist(),
            "lost": np.round(state.lost, 4).tolist(),
            "rest_windows": state.rest.astype(np.int64).tolist(),
            "falls": state.falls.astype(np.int64).tolist(),
            "error": self.error,
        }
        return {**about, "guard": decision}

    def after_answer(self) -> None:
        after_answer(self.policy)

    def carry_over(self, state: dict[str, Any]) -> None:
        carry_over(self.policy, state)

    def peers(self) -> Any:
        """None. Raises `ConfigError` where the policy's workers would each decide for themselves."""
        if peers_of(self.policy) is not None:
            fix = "leave guard out: a guard sees all workers' times"
            raise ConfigError("guard", True, "False or None with the stigmergic policy", fix)

    def state_dict(self) -> dict[str, Any]:
        own = {e.name: np.asarray(getattr(self.state, e.name), np.float64).tolist() for e in fields(GuardState)}
        return {"guarded": self.policy.state_dict(), "model": self.fitted.state_dict(self.policy), "guard": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also of a policy that was not guarded: the guard then starts anew."""
        if "guarded" not in state:
            self.policy.load_state_dict(state)
            return
        self.policy.load_state_dict(state["guarded"])
        self.fitted.load_state_dict(state)
        own = state["guard"]
        self.state = GuardState(**{entry.name: array_of(own[entry.name]) for entry in fields(GuardState)})

    def _ask(self, window: Window, bounds: Bounds) -> tuple[Ints, Flags]:
        """The policy's answer, projected, and where (...) it has none."""
        shape = window.batch_size.shape
        try:
            wish = np.asarray(self.policy.decide(window, bounds), dtype=np.float64)
            why = f"answered sizes of shape {wish.shape}" if wish.shape != shape else "answered what is no batch size"
        except Exception as error:  # whatever it is, training can go on without this policy
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

    def _learned(self, window: Window, advantage: Floats) -> GuardState:
        """The state after the window that closed: was it as predicted, and would the rule's answer have been better?

        advantage   log goodput (...) of the rule's last answer over the policy's
        """
        old, value = self.state, self.model.achieved(window)
        in_force = np.asarray((window.batch_size == old.answer).all(-1))
        beyond = value - old.value - old.expected
        known = in_force & np.isfinite(beyond) & (old.comparing > 0)
        beyond = np.clip(np.where(known, beyond, 0.0), -_CLIP, _CLIP) * np.where(old.by_rule > 0, 1.0, -1.0)
        told = in_force & np.isfinite(advantage)
        advantage = np.where(told, advantage, 0.0)
        new = replace(
            old,
            surprise=np.where(known, _FORGET * old.surprise + beyond, old.surprise),
            squares=np.where(known, _FORGET * old.squares + beyond**2, old.squares),
            comparisons=np.where(known, _FORGET * old.comparisons + 1.0, old.comparisons),
            lead=np.where(told, old.lead + _FOLLOW * (advantage - old.lead), old.lead),
            value=np.where(in_force, value, np.nan),
        )
        more = np.maximum(0.0, old.lost + advantage + new.correction - self.margin)
        return replace(new, lost=np.where(told & (old.by_rule == 0), more, old.lost))

    def _chosen(self, old: GuardState, faulty: Flags, refused: Flags, comparable: Flags) -> GuardState:
        """Whose (...) the next window is, with every counter moved on by a window."""
        trying, idle = old.rest == 0, old.check == 0
        verdict = trying & (old.verifying > 0) & idle
        agreed = verdict & (old.lead + old.correction > self.margin)
        alarm = trying & idle & ~verdict & (old.lost > self.patience)
        fall = trying & (faulty | agreed | (alarm & (old.comparisons >= _ENOUGH)))
        ask = alarm & ~fall
        routine = trying & idle & ~fall & ~ask & (old.since >= old.every) & comparable
        check = np.where(fall, 0, np.where(ask, 4, np.where(routine, 2, old.check)))
        # Each comparison that leaves the policy in place earns it a longer time until the next.
        longer = np.minimum(2 * old.every, 8 * self.verify)
        # The rule takes over for longer each time, unless the policy had stayed long.
        next_rest = np.where(old.kept > 2 * old.next_rest, self.shortest, old.next_rest)
        rest = np.where(fall, next_rest, old.rest)
        resting = rest > 0
        checking = ~resting & (check > 0)
        checked = checking & (check % 2 == 0)
        by_rule = np.asarray(resting | checked | refused)
        running = np.where(refused & ~checked, _REFUSED, np.where(checking, _CHECK, _TRUSTED))
        return replace(
            old,
            # The next try begins on probation: half of the patience is gone.
            lost=np.where(fall, self.patience / 2, np.where(verdict, 0.0, old.lost)),
            rest=np.where(resting, rest - 1, rest),
            next_rest=np.where(fall, np.minimum(2 * next_rest, self.longest), next_rest),
            kept=np.where(resting, 0, old.kept + 1),
            check=np.where(checking, check - 1, check),
            verifying=np.where(ask, 1, np.where(fall | verdict, 0, old.verifying)),
            since=np.where(by_rule, 0, old.since + 1),
            every=np.where(fall, self.verify, np.where(routine | verdict, longer, old.every)),
            comparing=((by_rule != (old.by_rule > 0)) & comparable).astype(np.float64),
            falls=old.falls + fall,
            by_rule=by_rule.astype(np.float64),
            reason=np.where(fall, np.where(faulty, _FAULT, _WORSE), np.where(resting, old.reason, running)),
        )
