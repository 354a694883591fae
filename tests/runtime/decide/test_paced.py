"""Windows whose length a policy says: the same on every rank, replayed and resumed as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dynamix
from dynamix.errors import ConfigError
from dynamix.policies.paced import FIRST, MOST
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, classes, decided
from tests.runtime.state.test_resume import job
from tests.union import Script

LENGTHS = (1, 4, 2)


class Unlike(Script):
    """A script that also says how long the next window is."""

    @property
    def window_length(self) -> int:
        return LENGTHS[self.asked % len(LENGTHS)]


def _job(rank: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return job(rank, folder, epochs=1, policy=Unlike([[6, 1], [3, 4], [3, 4]]), **options)


@pytest.mark.multiproc
def test_lengths_are_agreed_on_and_repeat_in_a_replay_and_after_a_restart(tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    whole = run_ranks(_job, 2, str(tmp_path), {"events": events})
    told = list(decided(events))
    assert [event["window"]["steps"] for event in told[:7]] == [3, 4, 2, 1, 4, 2, 1]  # the first is the controller's
    assert [event["interval"] for event in told[:4]] == [4, 2, 1, 4]
    run_ranks(_job, 2, str(tmp_path), {"replay": events, "save_at": 9, "stop_at": 9})  # in a window of four
    resumed = run_ranks(_job, 2, str(tmp_path), {"replay": events, "resume": True})
    for before, after in zip(whole, resumed, strict=True):
        assert torch.equal(before["weights"], after["weights"])


def test_a_lone_worker_s_windows_follow_what_changes(tmp_path: Path) -> None:
    controller = dynamix.Controller("goodput", batch_size=4, interval="auto", events=tmp_path / "events.jsonl")
    job = Training(controller, classes(600), lr=0.01)
    for x, y in job.loader:
        job.backward(x, y)
        job.finish()
    controller.close()
    steps = [event["window"]["steps"] for event in decided(tmp_path / "events.jsonl")]
    assert steps[0] == FIRST
    assert max(steps) > 2 * FIRST
    assert max(steps) <= MOST


def test_what_cannot_have_such_windows_is_refused() -> None:
    with pytest.raises(ConfigError, match="interval='often'"):
        dynamix.Controller("goodput", 8, interval="often")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="decides in one place"):
        dynamix.Controller("stigmergic", 8, interval="auto")
