"""How many steps a task needs at which batch: `dynamix bench stepcount WORKLOAD...`.

Trains to a target at several global batches. By itself it looks for the best learning rate at each batch, over factors
of 2, until both neighbours are worse. A fit steps = s (1 + critical / B) (McCandlish et al. 2018) then says up to which
batch distributing pays: the curve of docs/design/jobs.md.

With `--rule` nothing is searched: the learning rate is the workload's own, moved by the named rule. `none` gives the
ratio of critical batch to noise scale that the simulator's progress uses. `adascale` gives what AdaScale counts as
progress, sum of (phi + B0) / (phi + B) B/B0 at the phi of the run itself: the law of the simulator and of the rules
holds as far as that is the same at every batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.errors import ConfigError
from dynamix.events.run_folder import commit, versions
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.runtime.rate.scaling import LearningRate
from dynamix_lab.harness.suite import Cell, Context, Suite, Tell
from dynamix_lab.report import Table, number
from dynamix_lab.tasks import Workload, make_workload, score

BEST = "best"
RULES = (BEST, "none", "adascale")
BATCHES = (32, 64, 128, 256, 512, 1024)
OWN_BATCHES = {"mnist1d": (64, 128, 256, 512), "digits": (16, 32, 64, 128, 256)}
TARGETS = {"digits": 0.95}  # fixed by hand, of workloads that have none of their own
SEEDS = (9001, 9002)  # the tuning seeds: never used for figures of policies
PARTS = 4
NOISE_EVERY = 10  # steps between measurements of noise where no rule needs them
MOST_RATES = 8  # tried at one batch
GIVEN_UP = 1.5  # of the steps of the best rate so far, after which another one is given up
PLATEAU_BATCH, PLATEAU_SAMPLES, PLATEAU_PART, PLATEAU_POWERS = 256, 131_072, 0.2, range(-3, 2)
SHARE = 0.95  # of the plateau's improvement that is the target


@dataclass(frozen=True, slots=True)
class Count:
    """Optimizer steps to the target, or None; median noise scale on the way, in samples; progress by AdaScale's count,
    in steps of the base batch, over the steps at which noise was measured."""

    steps: int | None
    noise_scale: float
    progress: float


@dataclass(slots=True)
class _Run:
    """One training run that goes on step by step."""

    workload: Workload
    batch: int
    seed: int
    rule: str = "none"
    learning_rate: float | None = None
    phis: list[float] = field(default_factory=list)

    def losses_finite(self, most: int) -> Iterator[tuple[int, nn.Module]]:
        """Trains a step at a time, at most so many; ends early where the loss is not a number any more."""
        workload, batch = self.workload, self.batch
        train, model = workload.make_data(self.seed).train, workload.make_model(self.seed)
        optimizer, base = workload.make_optimizer(model.parameters()), workload.base_batch
        for group in optimizer.param_groups if self.learning_rate is not None else ():
            group["lr"] = self.learning_rate
        learning_rate, noise_scale = LearningRate(optimizer, self.rule), NoiseScale()
        generator = torch.Generator().manual_seed(self.seed)
        every = NOISE_EVERY if self.learning_rate is not None else 1
        for step in range(1, most + 1):
            rows = torch.randint(len(train), (batch,), generator=generator)
            inputs, targets = train.__getitems__(rows.tolist())
            if step % every:
                loss = workload.loss(model(inputs), targets)
                if not math.isfinite(loss.item()):
                    return
                loss.backward()
            else:
                squares, whole = _backward(workload, model, inputs, targets)
                if not math.isfinite(whole):
                    return
                noise_scale.update(*NoiseScale.estimate(np.array(squares), whole, np.full(PARTS, batch / PARTS)))
                noise, signal = noise_scale.noise, noise_scale.signal
                learning_rate.set_factor(learning_rate.rule(batch / base, noise, signal, base_batch=base))
                self.phis.append(noise / signal if signal > 0 else np.nan)
            optimizer.step()
            optimizer.zero_grad()
            yield step, model


def _backward(workload: Workload, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[list[float], float]:
    """Leaves the mean gradient in `.grad`; |g|^2 of each of PARTS equal parts, and of the mean."""
    total, squares = [torch.zeros_like(p) for p in model.parameters()], []
    for x, y in zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True):
        workload.loss(model(x), y).backward()
        gradients = [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]
        squares.append(sum(float(g.pow(2).sum()) for g in gradients if g is not None))
        for kept, g, p in zip(total, gradients, model.parameters(), strict=True):
            kept.add_(0.0 if g is None else g / PARTS)
            p.grad = None
    for kept, p in zip(total, model.parameters(), strict=True):
        p.grad = kept
    return squares, sum(float(g.pow(2).sum()) for g in total)


def steps_to_target(
    workload: Workload,
    batch: int,
    seed: int,
    *,
    target: float,
    most: int,
    rule: str = "none",
    learning_rate: float | None = None,
) -> Count:
    """Trains at global batch `batch` with the given learning rate, or with what the named rule gives for the batch.

    Scores are taken after every 4 % of the steps so far. The target is reached where the line through the scores
    passes it, if the score after that is above it too.
    """
    run = _Run(workload, batch, seed, rule, learning_rate)
    test = workload.make_data(seed).test
    rest = math.ceil(len(test) / (4 * batch))  # scoring shall not cost more than training
    due, seen = rest, [(0, 0.0)]
    for step, model in run.losses_finite(most):
        if step < due:
            continue
        due = step + max(rest, step // 25)
        seen.append((step, score(workload, model, test)))
        if len(seen) > 2 and min(value for _, value in seen[-2:]) >= target:
            return _count(_crossing(seen[-3], seen[-2], target), run.phis, batch, workload.base_batch)
    return _count(None, run.phis, batch, workload.base_batch)


def _crossing(before: tuple[int, float], after: tuple[int, float], target: float) -> int:
    (start, low), (end, high) = before, after
    return end if high <= low or low >= target else math.ceil(start + (end - start) * (target - low) / (high - low))


def _count(steps: int | None, phis: Sequence[float], batch: int, base: int) -> Count:
    phi = np.array(phis[:steps] if steps and len(phis) > steps else phis, dtype=float)
    gain = np.where(np.isnan(phi), 1.0, (phi + base) / (phi + batch)) * batch / base  # no signal: phi is infinite
    known = phi[~np.isnan(phi)]
    return Count(steps, float(np.median(known)) if len(known) else float("nan"), float(gain.sum()))


def plateau(workload: Workload, tell: Tell) -> dict[str, Any]:
    """The target that the workload's own plateau gives: the untrained score plus `SHARE` of what training adds.

    The plateau is the mean score of the last fifth of a run of 131,072 samples at a global batch of 256, mean over the
    tuning seeds, at the constant learning rate whose plateau is highest.
    """
    most = PLATEAU_SAMPLES // PLATEAU_BATCH
    untrained = np.mean([score(workload, workload.make_model(s), workload.make_data(s).test) for s in SEEDS])
    found = {}
    for done, power in enumerate(PLATEAU_POWERS):
        rate = _own_rate(workload) * 2.0**power
        tell(f"plateau at {rate:g}", done / len(PLATEAU_POWERS))
        found[rate] = float(np.mean([_last_scores(workload, seed, rate, most) for seed in SEEDS]))
    best = max(found, key=lambda rate: found[rate])
    target = math.floor(1000 * (untrained + SHARE * (found[best] - untrained))) / 1000
    plateaus = {f"{rate:g}": value for rate, value in found.items()}
    return {"untrained": float(untrained), "plateaus": plateaus, "learning_rate": best, "target": target}


def _last_scores(workload: Workload, seed: int, rate: float, most: int) -> float:
    test, first = workload.make_data(seed).test, int((1 - PLATEAU_PART) * most)
    run = _Run(workload, PLATEAU_BATCH, seed, learning_rate=rate).losses_finite(most)
    scores = [score(workload, model, test) for step, model in run if step > first and step % 5 == 0]
    return float(np.mean(scores)) if scores else 0.0


def best_rate(measure: Callable[[int, float], float], start: int) -> int:
    """The power of 2 with the smallest measure: a search over neighbours until both are worse.

    measure   (power, bound) -> steps, infinite where more than `bound`

    Until one is finite, the search goes up and down in turn.

    >>> best_rate(lambda power, bound: abs(power - 3) + 1.0, 0)
    3
    """
    found = {start: measure(start, math.inf)}
    while len(found) < MOST_RATES:
        best = min(found, key=lambda power: (found[power], power))
        near = (best - 1, best + 1) if found[best] < math.inf else _outward(start)
        missing = [power for power in near if power not in found]
        if not missing:
            break
        found[missing[0]] = measure(missing[0], GIVEN_UP * found[best])
    return min(found, key=lambda power: (found[power], power))


def _outward(start: int) -> list[int]:
    """The powers about `start`, the nearest first.

    >>> _outward(0)[:4]
    [1, -1, 2, -2]
    """
    return [start + sign * step for step in range(1, MOST_RATES) for sign in (1, -1)]


@dataclass(frozen=True, slots=True)
class StepCountPlan:
    """names: workloads; rule: `best`, or a rule that moves the workload's own rate; batches: global ones, none for the
    usual; most: samples after which a run is given up.
    """

    names: tuple[str, ...]
    rule: str = BEST
    batches: tuple[int, ...] = ()
    most: int = 200_000

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        if self.rule not in RULES:
            raise ConfigError("rule", self.rule, ", ".join(RULES), "choose one of them")
        if any(batch < PARTS for batch in self.batches) or self.most < 1:
            raise ConfigError("batches", self.batches, f"{PARTS} or more, of 1 or more samples", "take larger ones")
        for name in self.names:
            workload = make_workload(name)
            if self.rule != BEST and _fixed_target(workload) is None:
                raise ConfigError("workload", name, "one whose target is fixed", f"take --rule {BEST}")

    def batches_of(self, name: str) -> tuple[int, ...]:
        """Global batches, the largest first: its best learning rate is where the search at the next one begins."""
        return tuple(sorted(self.batches or OWN_BATCHES.get(name, BATCHES), reverse=True))


def _fixed_target(workload: Workload) -> float | None:
    return TARGETS.get(workload.name) if workload.target is None else workload.target


def _own_rate(workload: Workload) -> float:
    return float(workload.make_optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"])


@dataclass(frozen=True)
class StepCountSuite(Suite):
    """`dynamix bench stepcount`: for each workload a cell for the plateau, and one a batch."""

    plan: StepCountPlan
    name: str = "stepcount"
    grows: ClassVar[frozenset[str]] = frozenset({"names", "batches"})

    def facts(self) -> dict[str, Any]:
        return {"cluster": "one process, one thread", "versions": versions(), "seeds": list(SEEDS)}

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{name}-{part}", (name, part))
            for name in self.plan.names
            for part in (*(("plateau",) if self.plan.rule == BEST else ()), *self.plan.batches_of(name))
        ]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return {**self._measured(cell.what[0], cell.what[1], context), "commit": commit()}
        finally:
            torch.set_num_threads(threads)

    def _measured(self, name: str, part: Any, context: Context) -> dict[str, Any]:
        workload = make_workload(name)
        if part == "plateau":
            return plateau(workload, context.tell)
        if self.plan.rule != BEST:
            return _row(self._counts(workload, part, self.plan.most // part, None))
        return self._best_row(workload, part, context)

    def _best_row(self, workload: Workload, batch: int, context: Context) -> dict[str, Any]:
        """Searches from half of the best rate at the next larger batch."""
        own, tried = _own_rate(workload), dict[float, list[Count]]()
        larger = [b for b in self.plan.batches_of(workload.name) if b > batch]
        found = context.found.get(f"{workload.name}-{larger[-1]}") if larger else None
        arrived = found is not None and None not in found["steps"]
        start = 1 if found is None or not arrived else round(math.log2(found["learning_rate"] / own)) - 1

        def measure(power: int, bound: float) -> float:
            rate = own * 2.0**power
            context.tell(f"{workload.name}, batch {batch}, rate {rate:g}", len(tried) / MOST_RATES)
            most = int(min(self.plan.most / batch, bound))
            tried[rate] = self._counts(workload, batch, most, rate, self._target(workload, context.found))
            steps = [count.steps for count in tried[rate]]
            return math.inf if None in steps else float(np.mean([s for s in steps if s is not None]))

        best = own * 2.0 ** best_rate(measure, start)
        rates = {f"{rate:g}": [count.steps for count in tried[rate]] for rate in sorted(tried)}
        return {**_row(tried[best]), "learning_rate": best, "rates": rates}

    def _target(self, workload: Workload, found: Mapping[str, Any]) -> float:
        fixed = _fixed_target(workload)
        return float(found[f"{workload.name}-plateau"]["target"]) if fixed is None else fixed

    def _counts(
        self, workload: Workload, batch: int, most: int, rate: float | None, target: float | None = None
    ) -> list[Count]:
        aim = _fixed_target(workload) if target is None else target
        assert aim is not None  # the plan's check
        rule = "none" if self.plan.rule == BEST else self.plan.rule
        train = functools.partial(steps_to_target, workload, batch, target=aim, rule=rule, learning_rate=rate)
        counts: list[Count] = []
        for seed in SEEDS:
            counts.append(train(seed, most=most))
            if rate is not None and counts[-1].steps is None:
                break  # a rate that fails with one seed is out
        return counts

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"rule": self.plan.rule, "workloads": {n: self._curve(n, cells) for n in self.plan.names}}

    def _curve(self, name: str, cells: Mapping[str, Any]) -> dict[str, Any]:
        workload = make_workload(name)
        batches = [b for b in reversed(self.plan.batches_of(name)) if f"{name}-{b}" in cells]
        # With searched rates noise is measured too rarely for AdaScale's count of progress.
        without = {"progress"} if self.plan.rule == BEST else set[str]()
        kept = {b: {k: v for k, v in cells[f"{name}-{b}"].items() if k not in without} for b in batches}
        table = [{"batch": b, **row} for b, row in kept.items()]
        at_all = {"plateau": cells[f"{name}-plateau"]} if f"{name}-plateau" in cells else {}
        target = _fixed_target(workload) if _fixed_target(workload) is not None else at_all["plateau"]["target"]
        about = {"description": workload.description, "metric": workload.metric_name, "target": target}
        return {**about, **at_all, "table": table, **fit(table)}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()


def _row(counts: list[Count]) -> dict[str, Any]:
    """Where a run was given up its place says None; so does a noise scale without a signal."""
    scales = [None if math.isnan(c.noise_scale) else round(c.noise_scale, 1) for c in counts]
    progress = [round(c.progress) for c in counts]
    return {"steps": [c.steps for c in counts], "noise_scale": scales, "progress": progress}


def table(result: Mapping[str, Any]) -> Table:
    """A row a workload and batch: steps and samples (mean of the seeds), best rate, and the fits of the workload."""
    head = ["workload", "target", "global batch", "learning rate", "steps", "samples", "noise scale"]
    head += ["critical batch" if result["rule"] == BEST else "critical batch (largest progress over smallest)"]
    rows = []
    for name, curve in result["workloads"].items():
        spread = "" if result["rule"] == BEST else f" ({number(curve.get('progress_spread'), 2)})"
        for i, row in enumerate(curve["table"]):
            steps = None if None in row["steps"] else float(np.mean(row["steps"]))
            scales = [scale for scale in row["noise_scale"] if scale is not None]
            first = [name, number(curve["target"], 3)] if i == 0 else ["", ""]
            rate = f"{row['learning_rate']:g}" if "learning_rate" in row else result["rule"]
            rate = "–" if steps is None and "learning_rate" in row else rate
            cells = [str(row["batch"]), rate, number(steps, 0), number(steps and steps * row["batch"], 0)]
            cells += [number(float(np.mean(scales)) if scales else None, 0)]
            rows.append([*first, *cells, f"{number(curve.get('critical_batch'), 0)}{spread}" if i == 0 else ""])
    return Table(head, rows)


def fit(table: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """steps = least_steps (1 + critical_batch / B), relative errors; and critical_batch over the median noise scale.

    Where progress was counted, `progress_spread` is the largest mean of a batch over the smallest. Nothing from fewer
    than two batches.

    >>> rows = [{"batch": b, "steps": [100 + 6400 // b], "noise_scale": [128.0]} for b in (64, 128, 256)]
    >>> round(fit(rows)["ratio"], 3)
    0.5
    """
    known = [
        (row["batch"], steps, math.nan if phi is None else phi)
        for row in table
        for steps, phi in zip(row["steps"], row["noise_scale"], strict=True)
        if steps
    ]
    if len({entry[0] for entry in known}) < 2:
        return {}
    batch, steps, phi = np.array(known, dtype=float).T
    design = np.column_stack([np.ones_like(batch), 1 / batch]) / steps[:, None]
    least, slope = np.linalg.lstsq(design, np.ones_like(batch), rcond=None)[0]
    means = [np.mean(row["progress"]) for row in table if all(row["steps"])] if "progress" in table[0] else []
    scale = float(np.nanmedian(phi)) if np.isfinite(phi).any() else None
    found = {"least_steps": least, "critical_batch": slope / least}
    found |= {"noise_scale": scale, "ratio": slope / least / scale} if scale else {}
    found |= {"progress_spread": max(means) / min(means)} if means and min(means) > 0 else {}
    return {name: float(value) for name, value in found.items()}
