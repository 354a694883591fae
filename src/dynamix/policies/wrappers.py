"""Optional methods of a policy besides `decide`, which a policy that wraps another passes on to it.

    report()            -> dict   what the events file records of a window, by event key. If it takes an argument
                                  `asked`: whether the policy decided on this window, or was busy with an earlier one
    peers()             -> rule   the rule by which every worker decides for itself, if the policy is one
    fit_model(window)   -> model  the policy's `JobModel`, with a window taken in before `decide` (`policies.fitted`)
    window_length                 attribute: optimizer steps of the next window, one number or (...)
    alternates                    attribute: it is several policies that take turns (`policies.alternating`)
    begins_anew                   attribute: it takes no state that another policy saved

Each function here (for `fit_model` `FittedModel`) handles a policy without that method. So callers need not know how a
policy is composed.
"""

import inspect
from typing import Any

import numpy as np

from dynamix.errors import StateError
from dynamix.policies.protocol import Policy
from dynamix.policies.registry import names_by_state
from dynamix.removed import message


def report_of(policy: Policy, *, asked: bool = True) -> dict[str, Any]:
    """Plain values for the events file, by event key; empty for a policy without a report."""
    method = getattr(policy, "report", None)
    if method is None:
        return {}
    takes = inspect.signature(method).parameters.values()
    tells = any(p.name == "asked" or p.kind is inspect.Parameter.VAR_KEYWORD for p in takes)
    return dict(method(asked=asked) if tells else method())


def peers_of(policy: Policy) -> Any:
    """The rule by which every worker decides for itself; None if one place decides for all."""
    method = getattr(policy, "peers", None)
    return None if method is None else method()


def window_length_of(policy: Policy) -> int | None:
    """Optimizer steps of a job's next window; None if the policy does not set it."""
    length = getattr(policy, "window_length", None)
    return None if length is None else int(length)


def load_policy(policy: Policy, state: dict[str, Any]) -> None:
    """`policy.load_state_dict(state)`, even if the state was saved under a wrapper that the policy does not have.

    Raises `StateError` if the state is of another policy, or of a version that stored other values.
    """
    refuse_learned(state)
    kept = policy.state_dict()
    fits = "paced" in kept or ("guarded" in kept and "guarded" in state)
    try:
        policy.load_state_dict(state if fits else unguarded(state, keep="guarded" in kept))
    except (StateError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise unfit(policy, state, error) from error


def own_part(policy: Policy, state: Any) -> Any:
    """The part of a state for `policy`, from a job that may have had another policy or several in turns; None: no part.

    A comparison resumes its own state, and starts anew after another job. A policy resumes its part of a comparison.
    """
    mine, compared = policy.state_dict(), state.get("compared")
    if getattr(policy, "begins_anew", False):
        same = isinstance(compared, dict) and compared.keys() == mine.get("compared", {}).keys()
        return state if same else None
    return next((of for of in compared.values() if of.keys() == mine.keys()), None)


def unfit(policy: Policy, state: Any, error: Exception) -> StateError:
    """The error for a saved state that `policy` cannot load: which policy saved it, and what to write."""
    anew = "controller.load_state_dict(state, policy=False)"
    if isinstance(state, dict):
        mine, theirs = (names_by_state(unguarded(of)) for of in (policy.state_dict(), state))
        if theirs and theirs != mine:
            here = mine[0] if len(mine) == 1 else type(policy).__name__
            why = f"the saved state is of the policy {' or '.join(theirs)}, and this job has {here}"
            go_on = f"write Controller({theirs[0]!r}, ...) to go on with the policy that saved it"
            return StateError(f"{why}: {go_on}, or {anew} to begin with {here} anew and keep the rest")
    return StateError(
        f"the saved state is of another policy than {type(policy).__name__}, or of another version ({error!r}): resume "
        f"with the policy and the version that saved it, or let it begin anew and keep the rest: {anew}"
    )


def refuse_learned(state: dict[str, Any]) -> None:
    """Raise `StateError` for the state of a policy of 0.2 that learned on its job."""
    if {"learned", "reference", "trials"} <= unguarded(state).keys():
        fix = "controller.load_state_dict(state, policy=False), and the policy begins anew"
        raise StateError(f"the saved state is of a policy that learns on the job (learn=True): {message(fix)}")


def unguarded(state: dict[str, Any], *, keep: bool = False) -> dict[str, Any]:
    """The policy's own part of a checkpoint, without a pace and a guard; `keep`: with the guard's part."""
    own: dict[str, Any] = state.get("paced", state)
    return own if keep else own.get("guarded", own)


def pace_as_written_now(pace: Any) -> Any:
    """The log goodput a step that goes stale, as `Paced` saves it. 0.2 saved a sum, and the number of its steps.

    Its estimate added 100 steps of the usual value to them.

    >>> pace_as_written_now({"stale": 1.14, "steps": 200.0}), pace_as_written_now(0.004)
    (0.005, 0.004)
    """
    if not isinstance(pace, dict):
        return pace
    stale, steps = (np.asarray(pace[name], np.float64) for name in ("stale", "steps"))
    return ((0.36 + stale) / (100.0 + steps)).tolist()
