"""`dynamix bench workloads`: speed, gradient noise and reachable score of each workload on this machine.

One process with one thread trains at the workload's base batch for a given time. The clock is the process's own
processor time, so that other work on the machine costs steps little; `processor_share` (of wall time) says how much
there was. Evaluation and the measurement of noise are off the clock. "Reached" is the best score in that time, not a
plateau: `still_rising` says whether more time would have helped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.errors import ConfigError
from dynamix.events.run_folder import commit, versions
from dynamix.runtime.measure.noise import NoiseScale
from dynamix_lab.harness.suite import Cell, Context, Suite, Tell, untold
from dynamix_lab.report import Table, number
from dynamix_lab.tasks import Arrays, Data, Workload, make_workload, score, workload_names

QUICK = ("digits", "mnist1d", "pysource", "ratings")
PARTS = 4  # equal shares that a noise measurement cuts a batch into
EVALUATIONS = 16
NOISE_MEASUREMENTS = 24
WARM_UP_STEPS = 3
RISING = 0.005  # a gain of the last quarter above this: the score was still rising


@dataclass(frozen=True, slots=True)
class WorkloadsPlan:
    """names: workloads to measure; budget_s: processor seconds of training each; seed: of data, weights and sample
    order.
    """

    names: Sequence[str] = ()
    budget_s: float = 60.0
    seed: int = 0

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        if not self.budget_s > 0:
            raise ConfigError("seconds", self.budget_s, "more than 0", "check the argument")
        if not 0 <= self.seed < 2**31:
            raise ConfigError("seed", self.seed, "0 to 2147483647", "take another seed")
        for name in self.names:
            make_workload(name)

    @classmethod
    def of(
        cls, *, quick: bool = False, names: Sequence[str] | None = None, budget_s: float | None = None, seed: int = 0
    ) -> WorkloadsPlan:
        """All workloads that need no files, 60 s each; `quick`: one of each kind, 8 s each."""
        chosen = names or (QUICK if quick else workload_names(bundled=True))
        return cls(tuple(chosen), (8.0 if quick else 60.0) if budget_s is None else budget_s, seed)


@dataclass(frozen=True)
class WorkloadsSuite(Suite):
    """`dynamix bench workloads`: a cell a workload."""

    plan: WorkloadsPlan
    name: str = "workloads"
    grows: ClassVar[frozenset[str]] = frozenset({"names"})

    def facts(self) -> dict[str, Any]:
        about = {"cluster": "one process, one thread", "versions": versions()}
        return {**about, "seeds": [self.plan.seed], "budget_s": self.plan.budget_s}

    def cells(self) -> list[Cell]:
        return [Cell(name) for name in self.plan.names]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        # A resumed suite may hold rows of several commits.
        return {**_measured(cell.key, self.plan, context.tell), "commit": commit()}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"workloads": dict(cells)}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()


def _measured(name: str, plan: WorkloadsPlan, tell: Tell) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tell(f"{name}: making data", 0.0)
        workload = make_workload(name)
        data = workload.make_data(plan.seed)
        return measure(workload, data, budget_s=plan.budget_s, seed=plan.seed, tell=tell)
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True)
class _Seen:
    """What one measurement collects: processor seconds of each step, (seconds, step, score), (noise, signal)."""

    steps_s: list[float] = field(default_factory=list)
    scores: list[tuple[float, int, float]] = field(default_factory=list)
    noise: list[tuple[float, float]] = field(default_factory=list)
    trained_s: float = 0.0
    wall_s: float = 0.0


def measure(workload: Workload, data: Data, *, budget_s: float, seed: int, tell: Tell = untold) -> dict[str, Any]:
    """One workload's row: parameters, batch, steps/s, samples/s, noise scale early and late, and what it reached."""
    model = workload.make_model(seed)
    optimizer = workload.make_optimizer(model.parameters())
    batch = min(workload.base_batch, len(data.train))
    untrained = score(workload, model, data.test)
    seen, scored_at, noise_at = _Seen(), 0.0, 0.0
    for step, rows in enumerate(_batches(len(data.train), batch, seed)):
        inputs, targets = data.train.__getitems__(rows)
        if seen.trained_s >= noise_at:
            noise_at += budget_s / NOISE_MEASUREMENTS
            seen.noise.append(noise_and_signal(workload, model, inputs, targets))
        began, began_wall = time.process_time(), time.perf_counter()
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took_s, took_wall = time.process_time() - began, time.perf_counter() - began_wall
        if step < WARM_UP_STEPS:
            continue
        seen.steps_s.append(took_s)
        seen.trained_s += took_s
        seen.wall_s += took_wall
        if seen.trained_s >= scored_at or seen.trained_s >= budget_s:
            scored_at += budget_s / EVALUATIONS
            seen.scores.append((seen.trained_s, step + 1, score(workload, model, data.test)))
            tell(f"{workload.name}: {seen.scores[-1][2]:.3f}", min(seen.trained_s / budget_s, 1.0))
        if seen.trained_s >= budget_s:
            break
    return {**_about(workload, model, batch, data), "untrained": untrained, **_summary(seen, batch, budget_s)}


def _batches(samples: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Whole batches of shuffled epochs, without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(samples)
        for start in range(0, samples - batch + 1, batch):
            yield order[start : start + batch].tolist()


def noise_and_signal(workload: Workload, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """(tr(Sigma) per sample, |G|^2) from the batch cut into `PARTS`, as that many workers would measure them.

    Gradients are cleared; NaN where the batch has fewer than two parts. Sparse gradients count as the dense ones they
    stand for.
    """
    squares, samples, counts = [], [], []
    union = torch.zeros(())
    for x, y in zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True):
        workload.loss(model(x), y).backward()
        gradient = _gradient(model)
        squares.append(float(gradient.square().sum()))
        samples.append(len(y))
        counts.append(workload.divisor(y))
        union = union + counts[-1] * gradient
        model.zero_grad()
    whole = float((union / sum(counts)).square().sum())
    sizes, weights = np.array(samples, dtype=np.float64), np.array(counts, dtype=np.float64)
    return NoiseScale.estimate(np.array(squares), whole, sizes, weights)


def _gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector, double precision: the signal is a small difference of large squares."""
    parts = []
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append((gradient.to_dense() if gradient.is_sparse else gradient).flatten().double())
    return torch.cat(parts)


def _about(workload: Workload, model: nn.Module, batch: int, data: Data) -> dict[str, Any]:
    return {
        "description": workload.description,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": batch,
        "train_samples": len(data.train),
        "test_samples": len(data.test),
        "counts_per_sample": _counts_per_sample(workload, data.train),
        "metric": workload.metric_name,
        "target": workload.target,
    }


def _counts_per_sample(workload: Workload, data: Arrays) -> float:
    return workload.divisor(data.targets) / len(data)


def _summary(seen: _Seen, batch: int, budget_s: float) -> dict[str, Any]:
    step_s = float(np.median(seen.steps_s))
    best_s, best_step, best = max(seen.scores, key=lambda scored: scored[2])
    earlier = max((value for at_s, _, value in seen.scores if at_s <= 0.75 * budget_s), default=0.0)
    third = max(1, len(seen.noise) // 3)
    return {
        "step_s": step_s,
        "steps_per_s": 1 / step_s,
        "samples_per_s": batch / step_s,
        "steps": len(seen.steps_s) + WARM_UP_STEPS,
        "trained_s": seen.trained_s,
        "processor_share": seen.trained_s / seen.wall_s,
        "reached": best,
        "reached_after_s": best_s,
        "reached_after_steps": best_step,
        "still_rising": best - earlier > RISING,
        "noise_scale_early": _ratio(seen.noise[:third]),
        "noise_scale_late": _ratio(seen.noise[-third:]),
    }


def _ratio(measured: list[tuple[float, float]]) -> float | None:
    """Mean noise / mean signal, in samples; None where the signal is not above zero: the scale is beyond the batch by
    far.
    """
    noise, signal = np.mean(measured, axis=0)
    return float(noise / signal) if signal > 0 and noise >= 0 else None


def table(result: Mapping[str, Any]) -> Table:
    """A row a workload; a score marked + was still rising when time was up."""
    head = ["workload", "parameters", "batch", "steps/s", "samples/s", "noise scale, first to last third"]
    head += ["score untrained", "reached", "of", "in"]
    rows = [
        [
            name,
            f"{row['parameters']:,}",
            str(row["batch"]),
            number(row["steps_per_s"], 1),
            f"{row['samples_per_s']:,.0f}",
            " to ".join(_scale(row[f"noise_scale_{when}"]) for when in ("early", "late")),
            number(row["untrained"], 3),
            f"{row['reached']:.3f}{'+' if row['still_rising'] else ''}",
            row["metric"],
            f"{row['reached_after_steps']:,} steps, {row['reached_after_s']:.0f} s",
        ]
        for name, row in result["workloads"].items()
    ]
    return Table(head, rows)


def _scale(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"
