"""The guard in a live job: on by default for learned policies, in the events, in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dynamix
from dynamix.errors import ConfigError
from dynamix.policies.guard import Guard
from dynamix.runtime.state.packing import pack, unpack
from tests.runtime.jobs import Training, adaptive, classes, decided
from tests.union import Script


class Broken(Script):
    """Answers twice, then raises."""

    def decide(self, window: Any, bounds: Any) -> Any:
        if self.asked >= 2:
            raise ZeroDivisionError("on purpose")
        return super().decide(window, bounds)


def _train(policy: Any, events: Path | None, *, epochs: int = 3, **options: Any) -> dynamix.Controller:
    job = Training(adaptive(policy, interval=4, events=events, **options), classes(240))
    for x, y in job.batches(epochs):
        job.backward(x, y)
        job.finish()
    job.controller.close()
    return job.controller


@pytest.mark.filterwarnings("ignore:the policy failed:RuntimeWarning")
def test_a_policy_that_breaks_does_not_end_a_watched_job(tmp_path: Path) -> None:
    controller = _train(Broken([[16], [12]]), tmp_path / "events.jsonl", guard=True)
    assert controller.samples_seen == 720
    events = decided(tmp_path / "events.jsonl")
    reports = [event["guard"] for event in events]
    assert {"by", "reason", "lost", "rest_windows", "falls", "error"} <= set(reports[0])
    assert "fault" not in {report["reason"] for report in reports[:2]}  # which else depends on real times
    assert reports[2]["reason"] == "fault"
    assert "on purpose" in reports[-1]["error"]
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        _train(Broken([[16], [12]]), None)


def test_learned_policies_are_watched_unless_it_is_turned_off(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jsonl" for i in range(3)]
    watched = _train("dynamix", paths[0], epochs=1)
    _train("dynamix", paths[1], epochs=1, guard=False)
    _train("lb_bsp", paths[2], epochs=1)
    assert ["guard" in decided(path)[0] for path in paths] == [True, False, False]
    state = json.loads(json.dumps(unpack(watched.state_dict()["policy"])))
    guard = Guard(Script([[8]]))
    guard.policy = watched.policy
    guard.load_state_dict(state)
    assert json.loads(json.dumps(unpack(pack(guard.state_dict())))) == state
    with pytest.raises(ConfigError, match="guard='yes'"):
        dynamix.Controller("dynamix", 8, guard="yes", global_batch="adaptive")  # type: ignore[arg-type]
