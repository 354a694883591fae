"""A job whose policies take turns trains on rightly, and says which of them is faster; also after a restart."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import dynamix
from dynamix.cli.app import app
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


class Job:
    """One training from one policy, over a group of its own; it may go on from a state."""

    def __init__(self, policy: str, events: str, state: Any = None) -> None:
        self.controller = dynamix.Controller(policy, BATCH, events=events, process_group=dist.new_group())
        self.steps = Training(self.controller, DATA, Slow(), sampling={"seed": 3})
        if state is not None:
            self.controller.load_state_dict(state)

    def train(self, first: int, end: int) -> dict[str, Any]:
        """The indices that this rank had by epoch, the totals of regular rounds, and the sizes at the end."""
        seen, totals = dict[int, list[int]](), set[int]()
        for epoch in range(first, end):
            self.steps.sampler.set_epoch(epoch)
            for x, y, index in self.steps.loader:
                plan = self.steps.sampler.plan()
                totals |= {int(plan.counts.sum())} if plan.regular else set()
                self.steps.train(x, y)
                seen.setdefault(epoch, []).extend(index.tolist() if plan.counts[dist.get_rank()] else [])
        self.state, sizes = self.controller.state_dict(), self.controller.batch_sizes.tolist()
        self.controller.close()
        return {"seen": seen, "weights": self.steps.weights(), "totals": totals, "sizes": sizes}


def _compared(rank: int, folder: str) -> list[dict[str, Any]]:
    """A comparison; the same gone on with; and two other jobs that take its part."""
    names, told = "compare:static,lb_bsp,static", []
    begun = Job(names, f"{folder}/events.jsonl")
    told.append(begun.train(0, 4))
    for number, policy in enumerate((names, "lb_bsp", "compare:static,goodput")):
        told.append(Job(policy, f"{folder}/{number}.jsonl", begun.state).train(4, 5))
    return told


@pytest.mark.multiproc
@pytest.mark.timeout(180)
def test_the_faster_policy_is_named_and_the_job_trains_rightly_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    told = run_ranks(_compared, 2, str(tmp_path), timeout_s=150)
    before = [of_rank[0] for of_rank in told]
    for epoch in range(4):
        assert sorted(index for rank in before for index in rank["seen"][epoch]) == list(range(SAMPLES))
    assert torch.equal(before[0]["weights"], before[1]["weights"])
    assert before[0]["totals"] == {2 * BATCH}
    turns = PolicyTurns(tmp_path / "events.jsonl")
    turns.refresh()
    _, faster, again = turns.speeds()
    assert 1 < faster.times < 2.6  # 32 ms over 12.8 ms, and what a step takes besides
    assert again.times < faster.times
    events = decided(tmp_path / "events.jsonl")
    assert {event["window"]["steps"] for event in events[1:]} == {5}
    static = [e["window"]["batch_size"] for e in events if e.get("compare", {}).get("turn", "").startswith("static")]
    assert {tuple(sizes) for sizes in static} == {(BATCH, BATCH)}
    blocks = [e["compare"]["block"] for e in [*events, *decided(tmp_path / "0.jsonl")] if "compare" in e]
    assert blocks == sorted(blocks)
    assert blocks[-1] > events[-1]["compare"]["block"] > 1  # it goes on where it was
    first, second = told[0][2]["sizes"]
    assert first > second  # lb_bsp alone has its part
    assert sum(told[0][3]["sizes"]) == 2 * BATCH  # another comparison begins anew


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
    # Which one it is, and by how much, depends on what else this machine does.
    rates = {one["policy"]: one["samples"] / one["seconds"] for one in (first, second)}
    fastest = max(rates, key=rates.__getitem__)
    assert result["fastest"] == fastest
    took = first["seconds"] + second["seconds"]
    assert math.isclose(1 - result["cost"], (first["samples"] + second["samples"]) / rates[fastest] / took)
    again = CliRunner().invoke(app, ["compare", "--read", str(tmp_path / "run")])
    assert again.exit_code == 0
    assert again.stdout.strip() == result["text"]
    assert f"lb_bsp  {second['times']:.2f} (" in again.stdout
    assert f"{fastest} alone would have saved" in again.stdout
    assert math.isclose(result["policies"][1]["samples_s"], second["samples"] / second["seconds"])


def test_a_job_is_ended_after_so_many_minutes_of_training(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS.format(root=str(Path(__file__).parents[3])))
    out = ["--out", tmp_path / "run"]
    short = [*out, "--policies", "static,lb_bsp", "--minutes", "0.1", "--every", "1"]
    done = command(*short, "--", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("static  1.00")
    assert done.stderr.count("times as fast: static 1.00, lb_bsp 1.8") >= 1
    *before, last = done.stderr.splitlines()  # after what the job prints of its end
    assert last.startswith("compare: ended the job by SIGTERM (signal 15) after 0.1 minutes")
    assert not any("ended the job" in line for line in before)


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
    nothing = command("--out", tmp_path / "a", "--", "true")
    assert nothing.returncode == 2
    assert "makes no dynamix.Controller" in nothing.stderr
    assert command("--out", tmp_path / "b", "--", "sh", "-c", "exit 3").returncode == 3
    wrong = CliRunner().invoke(app, ["compare", "--policies", "static,goodput:adaptive", "--out", "c", "--", "true"])
    assert wrong.exit_code == 2
    assert "dynamix emulate SCENARIO --compare" in wrong.stderr
    assert "command" in CliRunner().invoke(app, ["compare"]).stderr
