"""`dynamix bench faults`: what its checks notice, and a real fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites.faults import suite as faults
from dynamix_lab.suites.faults.check import faults_of, history
from dynamix_lab.suites.faults.inject import FAULTS, drawn
from dynamix_lab.suites.faults.job import FaultsJob, data, network, optimizer_of, traces_of

JOB = FaultsJob(samples=60, epochs=2, width=8)


def _logs(folder: Path, *, weights: tuple[float, float] = (1.0, 1.0), stop: int = 10**9, run: int = 0) -> None:
    """Logs of two ranks that take 4 and 2 samples of each step, as if weighted so (1, 1: rightly)."""
    net, (x, y, _) = network(JOB), data(JOB).tensors
    optimizer = optimizer_of(JOB, net)
    lines: list[list[dict[str, Any]]] = [[{"from": 0}], [{"from": 0}]]
    for step in range(min(20, stop)):
        at = 6 * step % 60
        ids = [list(range(at, at + 4)), list(range(at + 4, at + 6))]
        optimizer.zero_grad()
        for part, weight in zip(ids, weights, strict=True):
            (F.cross_entropy(net(x[part]), y[part]) * len(part) / 6 * weight).backward()
        optimizer.step()
        for rank in range(2):
            lines[rank].append({"step": step, "ids": ids[rank], "sizes": [4, 2], "traces": traces_of(net)})
    for rank in range(2):
        text = "".join(json.dumps(line) + "\n" for line in lines[rank])
        (folder / f"{run}-{rank}.jsonl").write_text(text + '{"half a li')


def test_a_right_history_passes_also_in_two_runs(tmp_path: Path) -> None:
    _logs(tmp_path, stop=7)
    whole = tmp_path / "whole"
    whole.mkdir()
    _logs(whole)
    for rank in range(2):
        first, *steps = (whole / f"0-{rank}.jsonl").read_text().splitlines()[:-1]
        later = [json.dumps({"from": 5}), *steps[5:]]
        (tmp_path / f"1-{rank}.jsonl").write_text("\n".join(later) + "\n")
        assert json.loads(first) == {"from": 0}
    steps, wrong = history(tmp_path, 2, 2)
    assert not wrong
    assert len(steps) == 20
    assert faults_of(JOB, steps) == []


def test_wrong_weights_lost_samples_and_unlike_beginnings_are_noticed(tmp_path: Path) -> None:
    _logs(tmp_path, weights=(0.99, 1.0))
    steps, wrong = history(tmp_path, 1, 2)
    assert not wrong
    assert "step 0: parameters are" in faults_of(JOB, steps)[0]
    _logs(tmp_path)
    steps, _ = history(tmp_path, 1, 2)
    steps[3] = replace(steps[3], ids=[[0, 1, 2, 3], steps[3].ids[1]])
    assert faults_of(JOB, steps)[0] == "4 samples lost, 4 repeated"
    text = (tmp_path / "0-1.jsonl").read_text().replace('{"from": 0}', '{"from": 3}')
    (tmp_path / "0-1.jsonl").write_text(text)
    assert history(tmp_path, 1, 2)[1] == ["run 0 began at steps [0, 3]"]


def test_cases_are_drawn_from_their_seed_and_the_full_plan_holds_200() -> None:
    assert drawn("kill", 3) == drawn("kill", 3) != drawn("kill", 4)
    assert {drawn("kill", seed).victim for seed in range(30)} == {0, 1, 2}
    plan = faults.FaultsPlan.of()
    assert len(plan.faults) * plan.seeds >= 200
    assert set(plan.faults) == set(FAULTS) - {"none"}
    with pytest.raises(ConfigError, match="nonsense"):
        faults.FaultsPlan.of(faults=("nonsense",)).check()


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_a_real_fault_leaves_nothing_wrong(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plan = replace(faults.FaultsPlan.of(quick=True), faults=("kill",))
    with RunFolder("faults", tmp_path / "run") as folder:
        result = run_suite(faults.FaultsSuite(plan), folder)
    assert result["injected"] == 1
    assert result["right"] == 1, result["faults"]
    assert "1 of 1 faults" in (tmp_path / "run" / "table.md").read_text()
