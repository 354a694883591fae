"""A job whose policies take turns trains on rightly, and says which of them is faster; also after a restart."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError
from dynamix.runtime.config import JobConfig
from dynamix.runtime.limits import Limits
from dynamix.telemetry.turns import PolicyTurns
from tests.processes import LAUNCH, ONE_HOST, call
from tests.ranks import run_ranks
from tests.refused import refused
from tests.runtime.jobs import Training, classes, decided

SAMPLES, BATCH = 1000, 8
SECONDS = (0.001, 0.004)  # a sample, of each rank
DATA = TensorDataset(*classes(SAMPLES).tensors, torch.arange(SAMPLES))
SCRIPT = Path(__file__).parents[3] / "examples" / "balance.py"


class Slow(nn.Module):
    """A classifier that takes its rank's time for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SECONDS[dist.get_rank()] * len(x))
        out: Tensor = self.net(x)
        return out


def job(
    rank: int, folder: str, policy: str, epochs: int, *, save: bool = False, resume: bool = False, **told: str
) -> dict[str, Any]:
    """Trains; the indices that this rank had by epoch, its weights and the learning rates of its steps."""
    os.environ |= told
    controller = dynamix.Controller(policy, BATCH, events=f"{folder}/events.jsonl")
    steps = Training(controller, DATA, Slow(), sampling={"seed": 3})
    saved, seen = Path(folder) / f"state{rank}.pt", dict[int, list[int]]()
    if resume:
        controller.load_state_dict(torch.load(saved, weights_only=True))
    totals = set[int]()
    for epoch in range(epochs):
        steps.sampler.set_epoch(epoch)
        for x, y, index in steps.loader:
            counts = steps.sampler.plan().counts
            totals |= {int(counts.sum())} if steps.sampler.plan().regular else set()
            steps.train(x, y)
            seen.setdefault(epoch, []).extend(index.tolist() if counts[rank] else [])
    if save:
        torch.save(controller.state_dict(), saved)
    sizes = controller.batch_sizes.tolist()
    controller.close()
    return {"seen": seen, "weights": steps.weights(), "totals": totals, "sizes": sizes}


@pytest.mark.multiproc
@pytest.mark.timeout(180)
def test_the_faster_policy_is_named_and_the_job_trains_rightly_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    names = "compare:static,lb_bsp,static"
    before = run_ranks(job, 2, str(tmp_path), names, 4, timeout_s=100)
    for epoch in range(4):
        assert sorted(index for rank in before for index in rank["seen"][epoch]) == list(range(SAMPLES))
    assert torch.equal(before[0]["weights"], before[1]["weights"])
    assert before[0]["totals"] == {2 * BATCH}
    turns = PolicyTurns(tmp_path / "events.jsonl")
    turns.refresh()
    _, faster, again = turns.speeds()
    assert 1.2 < faster.times < 2.6  # 32 ms over 12.8 ms, and what a step takes besides
    assert faster.low > 1
    assert again.times < faster.times
    events = decided(tmp_path / "events.jsonl")
    assert {event["window"]["steps"] for event in events[1:]} == {5}
    static = [e["window"]["batch_size"] for e in events if e.get("compare", {}).get("turn", "").startswith("static")]
    assert {tuple(sizes) for sizes in static} == {(BATCH, BATCH)}


@pytest.mark.multiproc
def test_a_comparison_goes_on_and_another_job_takes_its_part(tmp_path: Path) -> None:
    run_ranks(job, 2, str(tmp_path), "compare:static,lb_bsp", 2, timeout_s=60)  # what a whole one says
    (tmp_path / "events.jsonl").unlink()
    run_ranks(_saved, 2, str(tmp_path), "compare:static,lb_bsp", timeout_s=60)
    last = decided(tmp_path / "events.jsonl")[-1]["compare"]["block"]
    assert last > 1
    run_ranks(_resumed, 2, str(tmp_path), "compare:static,lb_bsp", timeout_s=60)
    blocks = [event["compare"]["block"] for event in decided(tmp_path / "events.jsonl") if "compare" in event]
    assert blocks == sorted(blocks)
    assert blocks[-1] > last
    for policy, told, even in (("lb_bsp", {}, False), ("compare:static,goodput", {}, None)):
        (sizes, _) = [rank["sizes"] for rank in run_ranks(_resumed, 2, str(tmp_path), policy, told, timeout_s=60)]
        assert even is None or (sizes[0] == sizes[1]) is even


def _saved(rank: int, folder: str, policy: str) -> dict[str, Any]:
    return job(rank, folder, policy, 2, save=True)


def _resumed(rank: int, folder: str, policy: str, told: dict[str, str] | None = None) -> dict[str, Any]:
    return job(rank, folder, policy, 3, resume=True, **(told or {}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"global_batch": "adaptive"}, "global_batch='adaptive'.*DYNAMIX_GLOBAL_BATCH=fixed.*whole runs"),
        ({"meet": "auto"}, "meet='auto'.*DYNAMIX_MEET=gradients.*whole runs"),
        ({"meet": "parameters"}, "meet='parameters'.*DYNAMIX_MEET=gradients"),
        ({"interval": "auto"}, "interval='auto'.*write interval=5"),
        ({"guard": True}, "guard=True.*guarded:NAME"),
        ({"limits": Limits(max_change=2.0)}, "max_change=2.0.*leave it out"),
    ],
)
def test_what_would_train_otherwise_is_refused_with_what_to_write(options: dict[str, Any], says: str) -> None:
    refused(ConfigError, says, JobConfig, 2, "compare:static,lb_bsp", 8, **options)
    JobConfig(2, "compare:static,lb_bsp", 8, interval=1, accumulate=2)
    JobConfig(2, "compare:static,lb_bsp", 8, micro_batch=4)


def command(*arguments: object, **options: Any) -> Any:
    return call("-m", "dynamix.cli.app", "compare", *arguments, env=ONE_HOST, **options)


@pytest.mark.multiproc
@pytest.mark.timeout(180)
def test_the_command_compares_in_a_script_that_nobody_edited(tmp_path: Path) -> None:
    options = ["--policies", "static,lb_bsp", "--every", "1", "--json", "--out", tmp_path / "run"]
    done = command(*options, "--", sys.executable, *LAUNCH, "2", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "of training" in done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    printed = done.stdout[done.stdout.index("{") :]
    assert json.loads(printed) == result
    first, second = result["policies"]
    assert (first["policy"], first["times"], first["low"]) == ("static", 1.0, None)
    assert second["times"] > 1.1
    assert result["fastest"] == "lb_bsp"
    assert 0 < result["cost"] < 0.5
    again = command("--read", tmp_path / "run")
    assert again.returncode == 0
    assert again.stdout.strip() == result["text"]
    assert f"lb_bsp  {second['times']:.2f} (" in again.stdout
    assert "lb_bsp alone would have saved" in again.stdout
    assert math.isclose(result["policies"][1]["samples_s"], second["samples"] / second["seconds"])


def test_a_job_is_ended_after_so_many_minutes_of_training(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS.format(root=str(Path(__file__).parents[3])))
    out = ["--out", tmp_path / "run"]
    done = command(
        *out, "--policies", "static,lb_bsp", "--minutes", "0.1", "--every", "1", "--", sys.executable, script
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("static  1.00")
    assert done.stderr.count("times as fast: static 1.00, lb_bsp 1.8") >= 1


# A job that has trained for 20 s, and would go on.
TRAINS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.telemetry.test_turns import job
job(Path(os.environ["DYNAMIX_EVENTS"]), "static,lb_bsp", 60)
time.sleep(100)
"""


def test_a_command_without_a_controller_or_a_right_name_says_so(tmp_path: Path) -> None:
    nothing = command("--out", tmp_path / "a", "--", sys.executable, "-c", "pass")
    assert nothing.returncode == 2
    assert "makes no dynamix.Controller" in nothing.stderr
    fails = command("--out", tmp_path / "b", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert fails.returncode == 3
    wrong = command("--policies", "static,goodput:adaptive", "--out", tmp_path / "c", "--", "true")
    assert wrong.returncode == 2
    assert "dynamix emulate SCENARIO --compare" in wrong.stderr
    assert not (tmp_path / "c").exists()
    assert "command" in command().stderr
