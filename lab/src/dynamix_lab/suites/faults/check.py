"""Was any sample lost, repeated or wrongly weighted? Compares the ranks' logs with one process on whole batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dynamix_lab.suites.faults.job import FaultsJob, data, network, optimizer_of, traces_of

CLOSE = 1e-9  # of the projections: float64, summed in another order


@dataclass(frozen=True, slots=True)
class TakenStep:
    """One optimizer step that counts: each rank's samples, and its checksums after the step."""

    ids: list[list[int]]
    traces: list[tuple[int, list[float]]]


def history(folder: Path, runs: int, ranks: int) -> tuple[list[TakenStep], list[str]]:
    """The steps that led to the final weights, and their errors: of every run, those before the next began."""
    steps: list[TakenStep] = []
    wrong: list[str] = []
    for run in range(runs):
        logs = [_lines(folder / f"{run}-{rank}.jsonl") for rank in range(ranks)]
        begins = {log[0]["from"] for log in logs if log}
        if not begins:
            continue  # ended before it began
        if len(begins) > 1:
            wrong.append(f"run {run} began at steps {sorted(begins)}")
            continue
        first = begins.pop()
        if first > len(steps):
            wrong.append(f"run {run} began at step {first}, but only {len(steps)} are logged")
        del steps[first:]
        taken = [[line for line in log if "step" in line] for log in logs]
        for number, lines in enumerate(zip(*taken, strict=False), first):
            if any(line["step"] != number for line in lines):
                wrong.append(f"run {run}: ranks were at steps {[line['step'] for line in lines]}")
            if any(line["sizes"] != lines[0]["sizes"] for line in lines):
                wrong.append(f"step {number}: ranks disagree about sizes")
            traces = [(int(line["traces"][0]), line["traces"][1]) for line in lines]
            steps.append(TakenStep([line["ids"] for line in lines], traces))
    return steps, wrong


def faults_of(job: FaultsJob, steps: Sequence[TakenStep]) -> list[str]:
    """The errors in the steps of a finished job; empty if all is right."""
    wrong: list[str] = []
    seen = Counter(i for step in steps for ids in step.ids for i in ids)
    expected = dict.fromkeys(range(job.samples), job.epochs)
    if dict(seen) != expected:
        lost = sum(max(0, job.epochs - seen[i]) for i in expected)
        repeated = sum(max(0, seen[i] - job.epochs) for i in expected)
        wrong.append(f"{lost} samples lost, {repeated} repeated")
    epoch: set[int] = set()
    for step in steps:
        now = [i for ids in step.ids for i in ids]
        if len(epoch) == job.samples:
            epoch = set()
        if not epoch.isdisjoint(now) or len(set(now)) != len(now):
            wrong.append("a sample came twice in an epoch")
            break
        epoch.update(now)
    if (off := _first_wrong_gradient(job, steps)) is not None:
        wrong.append(off)
    return wrong


def _first_wrong_gradient(job: FaultsJob, steps: Sequence[TakenStep]) -> str | None:
    """Train on the union of every step's batches in one process, and compare the parameters after each step."""
    net, (x, y, _) = network(job), data(job).tensors
    optimizer = optimizer_of(job, net)
    for number, step in enumerate(steps):
        if len({checksum for checksum, _ in step.traces}) > 1:
            return f"step {number}: ranks have other parameters"
        union = torch.tensor([i for ids in step.ids for i in ids])
        optimizer.zero_grad()
        F.cross_entropy(net(x[union]), y[union]).backward()
        optimizer.step()
        _, mine = traces_of(net)
        off = max(abs(a - b) for a, b in zip(mine, step.traces[0][1], strict=True))
        if not off <= CLOSE * (1 + number):
            return f"step {number}: parameters are {off:.1e} away from those of the union batch"
    return None


def ending(folder: Path, runs: int) -> tuple[float | None, int]:
    """(final held-out loss, failed saves of all ranks in all runs)."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in _lines(path)]
    losses = [line["loss"] for line in _lines(folder / f"{runs - 1}-0.jsonl") if "loss" in line]
    return (losses[0] if losses else None), sum(line.get("failed_saves", 0) for line in lines)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines, without an unfinished last one, whose writer was killed."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
