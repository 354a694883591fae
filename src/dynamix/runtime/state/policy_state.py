"""A policy's state: tried on a copy before the policy gets it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.data import Allocations
from dynamix.errors import StateError
from dynamix.policies import Policy
from dynamix.policies.guard import as_written_now
from dynamix.policies.wrappers import after_answer, carry_over, load_policy, unfit
from dynamix.projection import project
from dynamix.runtime.decide.job_facts import JobFacts
from dynamix.runtime.state import random_state
from dynamix.runtime.state.packing import alike
from dynamix.runtime.state.registry import Taking, Users
from dynamix.window import Bounds, Ints, Window


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a policy remembers; `here`: of these workers, so that it may go on with all of it."""

    state: Any
    here: bool

    def give(self, policy: Policy) -> None:
        """Let `policy` take it. Raises `StateError` if it is not of this policy."""
        (load_policy if self.here else carry_over)(policy, self.state)


class PolicyState(Users):
    """Of the policy of a job; `load_state_dict` and `check` get it as `Remembered`."""

    name = "policy"

    def __init__(self, policy: Policy, job: JobFacts, allocations: Allocations) -> None:
        self.policy, self.job, self.allocations = policy, job, allocations

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def check(self, state: Any) -> None:
        """Raise `StateError` unless a copy of the policy takes it, and one of ours decides.

        A policy that cannot be copied is not tried.
        """
        try:
            trial = copy.deepcopy(self.policy)
        except Exception:  # of any kind: locks, sockets, what a user's policy holds
            return
        before = random_state.capture()
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                state.give(trial)
                if _ours(trial):
                    if state.here and _differ(trial.state_dict(), state.state):
                        raise ValueError("it holds what the policy does not know, or numbers in another form")
                    _decide(trial, self.allocations.at(self.allocations.begin), self.job.bounds)
        except StateError:
            raise
        except Exception as error:  # a damaged state fails anywhere
            raise unfit(self.policy, state.state, error) from error
        finally:
            random_state.restore(before)

    def takings(self, state: Any) -> list[Taking]:
        return [(self.policy, lambda: state.give(self.policy))]


_OUR_PACKAGES = ("dynamix", "dynamix_lab")  # a policy of the lab's arrives by entry point, and is held to the same


def _ours(policy: Any) -> bool:
    while policy is not None:
        if type(policy).__module__.partition(".")[0] not in _OUR_PACKAGES:
            return False
        policy = getattr(policy, "policy", None)
    return True


def _differ(mine: Any, saved: Any) -> bool:
    """Whether two states of the same kind of policy differ."""
    if not isinstance(saved, dict) or mine.keys() != saved.keys():
        return isinstance(saved, dict) and not {"guarded", "paced"} & (mine.keys() ^ saved.keys())
    return not (alike(mine, saved) or alike(mine, as_written_now(saved)))


def _decide(policy: Any, sizes: Ints, bounds: Bounds) -> None:
    """Two windows, as a job might see them next; also of what a guard has under it."""
    share = np.maximum(sizes, 1) / max(float(sizes.mean()), 1.0)
    known: dict[str, Any] = {"compute": 0.1 * share, "compute_std": 0.01 * share, "wait": 0.01, "communication": 0.05}
    norms = {"noise": 100.0, "signal": 1.0, "global_norm_sq": 1.0, "gradient_norm_sq": 2.0}
    losses = {"loss": 1.0, "loss_std": 0.1, "loss_change": -0.1}
    window = Window.of(sizes, **known, **norms, **losses, data=0.001, steps=5.0)
    for _ in range(2):
        inner = policy
        while inner is not None:
            project(np.asarray(inner.decide(window, bounds)), bounds, current=sizes)
            inner = getattr(inner, "policy", None)
        after_answer(policy)
