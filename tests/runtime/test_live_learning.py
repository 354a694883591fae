"""`Controller(learn=True)` on real ranks: it learns, no step waits for it, and it resumes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.events.records import read_events
from dynamix.policies.learned.deviations import LiveConfig
from dynamix.policies.learned.online import LearningPolicy
from dynamix.policies.registry import make_policy
from dynamix.runtime.packing import unpack
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiproc
LEARN = LiveConfig(every_s=0.001, warm_up=2)


class Slow(LearningPolicy):
    """Takes half a second to learn."""

    def improve(self) -> None:
        if self._owed:
            time.sleep(0.5)
        super().improve()


def _train(rank: int, policy: Any, folder: str, resume: bool, updates: int = 2, most: int = 300) -> dict[str, Any]:
    """Trains until rank 0 has made that many updates, or for `most` steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(24_000, 16, generator=generator), torch.randint(0, 3, (24_000,), generator=generator)
    )
    events, path = Path(folder) / "events.jsonl", Path(folder) / f"rank{rank}.pt"
    options: dict[str, Any] = {
        "interval": 2,
        "global_batch": "adaptive",
        "max_global_batch": 80,
        "events": events,
        "guard": False,
    }
    controller = dynamix.Controller(policy, 32, learn=LEARN, **options)
    sampler = controller.batch_sampler(data)
    loader = DataLoader(data, batch_sampler=sampler)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = controller.wrap(DDP(net), optimizer)
    loaded = None
    if resume:
        controller.load_state_dict(torch.load(path, weights_only=True))
        loaded = controller.policy.state_dict()["learned"]  # type: ignore[attr-defined]
    plans: list[tuple[int, ...]] = []
    for x, y in itertools.islice(loader, most):
        made = torch.tensor([controller.policy.updates])  # type: ignore[attr-defined]
        dist.broadcast(made, 0)
        if made >= updates:
            break
        plans.append(tuple(sampler.plan().counts))
        logits = model(x)
        time.sleep(0.03)  # what a step takes: two milliseconds would leave rank 0 no time to answer
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss, logits=logits, target=y)
    state = controller.state_dict()
    torch.save(state, path)
    controller.close()
    return {
        "plans": plans,
        "loaded": loaded,
        "learned": unpack(state["policy"])["learned"],
        "windows": unpack(state["policy"])["windows"],
        "waited_s": controller._coordinator.channel.waited_s,
    }


@pytest.mark.parametrize("policy", ["dynamix", "dynamix-paper"])
def test_a_job_learns_while_it_trains_and_goes_on_after_a_restart(tmp_path: Path, policy: str) -> None:
    first = run_ranks(_train, 2, policy, str(tmp_path), False, timeout_s=60)
    assert first[0]["plans"] == first[1]["plans"]
    learned = first[0]["learned"]
    assert learned["updates"] > 0
    assert any(not torch.equal(learned["net"][name], learned["anchor"][name]) for name in learned["net"])
    # 1 %, and of a last window, of which the trial is paid for and the time not counted yet.
    assert 0 < sum(learned["spent_s"]) <= 0.02 * sum(learned["elapsed_s"])
    lines = read_events(tmp_path / "events.jsonl")
    assert lines[-1]["learning"]["updates"] >= learned["updates"] - 1

    again = run_ranks(_train, 2, policy, str(tmp_path), True, learned["updates"] + 1, timeout_s=60)
    for name, weights in learned["net"].items():
        assert torch.equal(weights, again[0]["loaded"]["net"][name])
    assert again[0]["loaded"]["spent_s"] == learned["spent_s"]
    assert torch.equal(again[0]["loaded"]["generator"], learned["generator"])
    assert again[0]["learned"]["updates"] > learned["updates"]


def _train_slowly(rank: int, folder: str) -> dict[str, Any]:
    return _train(rank, Slow(make_policy("dynamix-paper"), LEARN), folder, False, most=40)


def test_no_step_waits_for_learning(tmp_path: Path) -> None:
    """20 windows of a few milliseconds; were learning waited for, they would take 10 seconds more."""
    ranks = run_ranks(_train_slowly, 2, str(tmp_path), timeout_s=60)
    assert ranks[0]["plans"] == ranks[1]["plans"]
    assert {event["decision"] for event in read_events(tmp_path / "events.jsonl")} >= {"late"}
    assert max(rank["waited_s"] for rank in ranks) < 5
