"""Windows whose length a policy says: the same on every rank, replayed and resumed as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dynamix
from dynamix.errors import ConfigError
from dynamix.policies.paced import FIRST, MOST
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, adaptive, classes, decided
from tests.union import Script

LENGTHS = (1, 4, 2)


class Unlike(Script):
    """A script that also says how long the next window is."""

    @property
    def window_length(self) -> int:
        return LENGTHS[self.asked % len(LENGTHS)]


def _job(events: dict[str, str], *, state: Any = None, rounds: int | None = None) -> tuple[torch.Tensor, Any]:
    """Weights and state after an epoch, or so many rounds of it."""
    policy = Unlike([[6, 1], [3, 4], [3, 4]])
    job = Training(adaptive(policy, 4, interval=3, process_group=dist.new_group(), **events), classes(300))
    if state is not None:
        job.net.load_state_dict(state["net"])
        job.controller.load_state_dict(state["controller"])
    for number, (x, y) in enumerate(job.loader, 1):
        job.train(x, y)
        if number == rounds:
            break
    saved = {"net": job.net.state_dict(), "controller": job.controller.state_dict()}
    job.controller.close()
    return job.weights(), saved


def _whole_and_resumed(rank: int, events: str) -> list[torch.Tensor]:
    whole, _ = _job({"events": events})
    _, state = _job({"replay": events}, rounds=9)  # in a window of four
    return [whole, _job({"replay": events}, state=state)[0]]


@pytest.mark.multiproc
def test_lengths_are_agreed_on_and_repeat_in_a_replay_and_after_a_restart(tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    told = run_ranks(_whole_and_resumed, 2, events)
    windows = list(decided(events))
    assert [event["window"]["steps"] for event in windows[:7]] == [3, 4, 2, 1, 4, 2, 1]  # the first: the controller's
    assert [event["interval"] for event in windows[:4]] == [4, 2, 1, 4]
    for whole, resumed in told:
        assert torch.equal(whole, resumed)


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
