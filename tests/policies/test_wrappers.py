"""A policy's optional methods are called where it has them, also through what wraps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError, StateError
from dynamix.policies import make_policy
from dynamix.policies.guard import Guard
from dynamix.policies.stigmergic.policy import StigmergicPolicy
from dynamix.policies.wrappers import load_policy, peers_of, refuse_learned, report_of
from dynamix.window import Bounds, Ints, Window
from tests.runtime.jobs import Training, adaptive, classes, decided


class Notes:
    """A researcher's own policy that keeps what it has and says so."""

    def __init__(self) -> None:
        self.answered, self.loaded = 0, {}  # type: ignore[var-annotated]

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        self.answered += 1
        return window.batch_size

    def report(self, *, asked: bool) -> dict[str, Any]:
        return {"notes": {"asked": asked, "answered": self.answered}}

    def state_dict(self) -> dict[str, Any]:
        return {"answered": self.answered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def _trained(job: Training) -> None:
    for x, y in job.loader:
        job.train(x, y)
    job.controller.close()


@pytest.mark.parametrize("guard", [False, True])
def test_events_carry_its_report(tmp_path: Path, guard: bool) -> None:
    policy, path = Notes(), tmp_path / "events.jsonl"
    _trained(Training(adaptive(policy, events=path, guard=guard), classes(64)))
    events = decided(path)
    assert [event["notes"] for event in events] == [{"asked": True, "answered": i} for i in range(1, len(events) + 1)]
    assert all(("guard" in event) == guard for event in events)
    assert policy.answered == len(events) >= 3


def test_a_guard_passes_on_what_it_is_told_and_keeps_its_own_state_to_itself() -> None:
    policy = Notes()
    guard = Guard(policy)
    saved = guard.state_dict()
    assert report_of(guard, asked=False) == {"notes": {"asked": False, "answered": 0}}, "no verdict on that window"
    load_policy(policy, saved)
    assert policy.loaded == {"answered": 0}


def test_policies_without_these_methods_have_nothing_to_say() -> None:
    plain = make_policy("lb_bsp")
    assert report_of(plain) == {}
    assert peers_of(plain) is None
    assert peers_of(Guard(plain)) is None


def test_a_report_need_not_ask_whether_the_policy_was_asked() -> None:
    class Plain(Notes):
        def report(self) -> dict[str, Any]:  # type: ignore[override]
            return {"plain": 1}

    class Forwarding(Notes):
        def report(self, **about: Any) -> dict[str, Any]:
            return dict(about)

    assert report_of(Plain(), asked=False) == report_of(Guard(Plain()), asked=False) == {"plain": 1}
    assert report_of(Forwarding(), asked=False) == {"asked": False}


def test_a_report_may_hold_arrays_but_not_change_what_a_line_says_itself(tmp_path: Path) -> None:
    class Much(Notes):
        def report(self) -> dict[Any, Any]:  # type: ignore[override]
            told: dict[Any, Any] = {"array": np.array([1.0, np.nan]), "number": np.float32(2), "tensor": torch.ones(2)}
            told |= {"message": "mine", 7: 8, "self": [np.int64(9)]}
            return told | {"allocation": [1], "schema": 1, "piece": 3}

    path = tmp_path / "events.jsonl"
    job = Training(adaptive(Much(), events=path), classes(64))
    with pytest.warns(RuntimeWarning, match=r"report\(\) has 'allocation', 'piece', 'schema': .* Use another name"):
        _trained(job)
    for event in decided(path):
        told = [event[name] for name in ("array", "number", "tensor", "message", "7", "self")]
        assert told == [[1.0, None], 2.0, [1.0, 1.0], "mine", 8, [9]]
        assert event["allocation"] == event["window"]["batch_size"]
        assert "piece" not in event


@pytest.mark.parametrize("around", [(), ("guarded",), ("paced",), ("paced", "guarded")])
def test_the_state_of_a_policy_that_learned_on_the_job_is_refused_by_name(around: tuple[str, ...]) -> None:
    state: dict[str, Any] = {"learned": {}, "reference": {}, "trials": []}
    for wrapper in reversed(around):
        state = {wrapper: state, "model": None, "guard": {}, "pace": {}}
    with pytest.raises(StateError, match=r"learn=True.*removed in 0\.3: write .*policy=False"):
        load_policy(Guard(make_policy("dynamix")), state)
    with pytest.raises(StateError, match=r"learn=True.*removed in 0\.3: write .*policy=False"):
        refuse_learned(state)


def test_workers_that_decide_for_themselves_cannot_be_watched() -> None:
    rule = StigmergicPolicy()
    assert peers_of(rule) is rule
    with pytest.raises(ConfigError, match="leave guard out"):
        peers_of(Guard(rule))
