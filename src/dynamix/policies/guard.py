"""A watch over any policy: where it does worse than the goodput rule would, or fails, the rule takes over for a while.

The rule's answer and the policy's are compared by one job model, the policy's own if it decides by one. How much better
the rule's would have been is predicted by it, and the prediction is checked against what the job really achieved each
time the allocation passes from one of the two to the other. A one-sided cumulative sum (Page, Biometrika 1954) of what
the policy lost decides.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError
from dynamix.model import JobModel
from dynamix.model.measured import base_total
from dynamix.model.state import UNKNOWN, array_of
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

    FIELDS = (
        "lost", "lead", "rest", "next_rest", "kept", "check", "verifying", "since", "every", "comparing", "comparisons",
        "surprise", "squares", "falls", "by_rule", "reason", "value", "expected", "answer", "rules", "wishes",
    )  # fmt: skip

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
        self.lost: Floats = UNKNOWN  # (...) summed, since it was last 0
        self.lead: Floats = UNKNOWN  # (...) predicted advantage of the rule, smoothed
        self.rest: Floats = UNKNOWN  # (...) windows that are still the rule's
        self.next_rest: Floats = UNKNOWN  # (...)
        self.kept: Floats = UNKNOWN  # (...) windows since the policy was last tried again
        self.check: Floats = UNKNOWN  # (...) windows left of an A/B comparison; the even ones are the rule's
        self.verifying: Floats = UNKNOWN  # (...) whether that comparison is to decide
        self.since: Floats = UNKNOWN  # (...) windows since the rule's last
        self.every: Floats = UNKNOWN  # (...) and how many until the next comparison
        self.comparing: Floats = UNKNOWN  # (...) whether the allocation in force came from the other of the two
        self.comparisons: Floats = UNKNOWN  # (...) how many such windows were compared with the one before
        self.surprise: Floats = UNKNOWN  # (...) sum over them of how much better than predicted the rule did
        self.squares: Floats = UNKNOWN  # (...) sum of its squares
        self.falls: Floats = UNKNOWN  # (...)
        self.by_rule: Floats = UNKNOWN  # (...) whose the allocation in force is
        self.reason: Floats = UNKNOWN  # (...) index of `REASONS`
        self.value: Floats = UNKNOWN  # (...) log goodput of the last window
        self.expected: Floats = UNKNOWN  # (...) change of it that was predicted for the allocation in force
        self.answer: Floats = UNKNOWN  # (..., W) that allocation, and the two it was chosen from
        self.rules: Floats = UNKNOWN
        self.wishes: Floats = UNKNOWN

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
        wish, faulty = self._ask(window, bounds)
        rules = _rules_answer(model, window, bounds)
        if self.answer.shape != wish.shape:
            self._start(wish.shape)
        candidates = np.stack([rules, wish, window.batch_size, self.rules, self.wishes])
        values = model.log_goodput(candidates, costs="full", unknown="base")
        of_rule, of_wish, of_present, of_last_rule, of_last_wish = values
        correction, gain = self._learn(window, of_last_rule - of_last_wish), of_rule - of_wish
        # Where the policy proved better than predicted, it may also look worse.
        advantage = np.where(np.isnan(gain), 0.0, gain) + np.minimum(correction, 0.0)
        refused, differ = np.asarray(advantage > self.veto), np.asarray((rules != wish).any(-1))
        by_rule = self._choose(faulty, refused, differ & np.isfinite(self.value), correction)
        answer = np.where(by_rule[..., None], rules, wish)
        self.expected = np.where(by_rule, of_rule, of_wish) - of_present
        self.by_rule = by_rule.astype(np.float64)
        self.answer, self.rules = answer.astype(np.float64), rules.astype(np.float64)
        self.wishes = np.where(faulty[..., None], rules, wish).astype(np.float64)
        return answer

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

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        """The policy's own report, and as `guard` the last decision as plain values, lists for leading dimensions.

        asked   whether that decision was about the window reported on; docs/run-folder.md says what the values mean
        """
        about = report_of(self.policy, asked=asked)
        return {**about, "guard": self._last_decision()} if asked else about

    def after_answer(self) -> None:
        after_answer(self.policy)

    def carry_over(self, state: dict[str, Any]) -> None:
        carry_over(self.policy, state)

    def peers(self) -> Any:
        """None. Raises `ConfigError` where the policy's workers would each decide for themselves."""
        if peers_of(self.policy) is not None:
            fix = "leave guard out: a guard sees all workers' times"
            raise ConfigError("guard", True, "False or None with the stigmergic policy", fix)

    def _last_decision(self) -> dict[str, Any]:
        return {
            "by": np.where(self.by_rule > 0, "rule", "policy").tolist(),
            "reason": np.asarray(REASONS)[self.reason.astype(np.int64)].tolist(),
            "rule_advantage": np.round(self.lead + self.correction, 4).tolist(),
            "lost": np.round(self.lost, 4).tolist(),
            "rest_windows": self.rest.astype(np.int64).tolist(),
            "falls": self.falls.astype(np.int64).tolist(),
            "error": self.error,
        }

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name).tolist() for name in self.FIELDS}
        return {"guarded": self.policy.state_dict(), "model": self.fitted.state_dict(self.policy), "guard": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also of a policy that was not guarded: the guard then starts anew."""
        if "guarded" not in state:
            self.policy.load_state_dict(state)
            return
        self.policy.load_state_dict(state["guarded"])
        self.fitted.load_state_dict(state)
        for name in self.FIELDS:
            setattr(self, name, array_of(state["guard"][name]))

    # ------------------------------------------------------------ the policy's answer

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

    # ------------------------------------------------------------ what a window told

    def _learn(self, window: Window, advantage: Floats) -> Floats:
        """Take in the window that closed: was it as predicted, and would the rule's answer have been better? Returns
        `correction` after it.

        advantage   log goodput (...) of the rule's last answer over the policy's
        """
        value = self.model.achieved(window)
        in_force = np.asarray((window.batch_size == self.answer).all(-1))
        beyond = value - self.value - self.expected
        known = in_force & np.isfinite(beyond) & (self.comparing > 0)
        beyond = np.clip(np.where(known, beyond, 0.0), -_CLIP, _CLIP) * np.where(self.by_rule > 0, 1.0, -1.0)
        self.surprise = np.where(known, _FORGET * self.surprise + beyond, self.surprise)
        self.squares = np.where(known, _FORGET * self.squares + beyond**2, self.squares)
        self.comparisons = np.where(known, _FORGET * self.comparisons + 1.0, self.comparisons)
        told = in_force & np.isfinite(advantage)
        advantage = np.where(told, advantage, 0.0)
        self.lead = np.where(told, self.lead + _FOLLOW * (advantage - self.lead), self.lead)
        correction = self.correction
        more = np.maximum(0.0, self.lost + advantage + correction - self.margin)
        self.lost = np.where(told & (self.by_rule == 0), more, self.lost)
        self.value = np.where(in_force, value, np.nan)
        return correction

    # ------------------------------------------------------------ whose the next window is

    def _choose(self, faulty: Flags, refused: Flags, comparable: Flags, correction: Floats) -> Flags:
        """Where (...) the next window is the rule's; moves every counter on by a window."""
        trying, idle = self.rest == 0, self.check == 0
        verdict = trying & (self.verifying > 0) & idle
        agreed = verdict & (self.lead + correction > self.margin)
        alarm = trying & idle & ~verdict & (self.lost > self.patience)
        fall = trying & (faulty | agreed | (alarm & (self.comparisons >= _ENOUGH)))
        ask = alarm & ~fall
        routine = trying & idle & ~fall & ~ask & (self.since >= self.every) & comparable
        self.check = np.where(fall, 0, np.where(ask, 4, np.where(routine, 2, self.check)))
        self.verifying = np.where(ask, 1, np.where(fall | verdict, 0, self.verifying))
        # Each comparison that leaves the policy in place earns it a longer time until the next.
        longer = np.minimum(2 * self.every, 8 * self.verify)
        self.every = np.where(fall, self.verify, np.where(routine | verdict, longer, self.every))
        self._fall(fall)
        # The next try begins on probation: half of the patience is gone.
        self.lost = np.where(fall, self.patience / 2, np.where(verdict, 0.0, self.lost))
        resting = self.rest > 0
        checking = ~resting & (self.check > 0)
        checked = checking & (self.check % 2 == 0)
        by_rule = np.asarray(resting | checked | refused)
        running = np.where(refused & ~checked, _REFUSED, np.where(checking, _CHECK, _TRUSTED))
        self.reason = np.where(fall, np.where(faulty, _FAULT, _WORSE), np.where(resting, self.reason, running))
        self.comparing = ((by_rule != (self.by_rule > 0)) & comparable).astype(np.float64)
        self.rest = np.where(resting, self.rest - 1, self.rest)
        self.check = np.where(checking, self.check - 1, self.check)
        self.since = np.where(by_rule, 0, self.since + 1)
        self.kept = np.where(resting, 0, self.kept + 1)
        return by_rule

    def _fall(self, fall: Flags) -> None:
        """The rule takes over where (...) it is so; each time for longer, unless the policy had stayed long."""
        self.next_rest = np.where(self.kept > 2 * self.next_rest, self.shortest, self.next_rest)
        self.rest = np.where(fall, self.next_rest, self.rest)
        self.next_rest = np.where(fall, np.minimum(2 * self.next_rest, self.longest), self.next_rest)
        self.falls = self.falls + fall

    def _start(self, shape: tuple[int, ...]) -> None:
        """Nothing known of these clusters."""
        for name in self.FIELDS:
            setattr(self, name, np.zeros(shape[:-1]))
        self.next_rest = np.full(shape[:-1], float(self.shortest))
        self.every = np.full(shape[:-1], float(self.verify))
        self.value = np.full(shape[:-1], np.nan)
        self.answer, self.rules, self.wishes = np.full((3, *shape), -1.0)


def _rules_answer(model: JobModel, window: Window, bounds: Bounds) -> Ints:
    sizes = wish(model, window, bounds)
    # Without a noise scale the rule keeps any global batch, also one that a policy brought it to.
    total = np.where(model.guided, sizes.sum(-1), base_total(window))
    return project(sizes, bounds, total=total, current=window.batch_size)
