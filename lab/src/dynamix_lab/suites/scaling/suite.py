"""`dynamix bench scaling --cluster virtual`: the tables of the DYNAMIX paper again, by real training on the virtual
clock.

VGG-like-16 with SGD at 8, 16 and 32 workers and VGG-like-11 with SGD and with AdamW at 8, on the `paper-like` scenario.
In each case the best static size and the target are found on a tuning seed; then static at that size, the policies and
a reference with exact shares meet the same data, weights and disturbances, seed by seed. A cell of the suite is a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.window import Bounds
from dynamix_lab.harness.reference import references
from dynamix_lab.harness.runs import CENSOR_FACTOR, file_name
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import sections_markdown
from dynamix_lab.statistics import time_to_target
from dynamix_lab.suites.scaling.report import conclude, page, sections
from dynamix_lab.suites.scaling.virtual_world import NetEnv, at_workers, described
from dynamix_lab.tasks import Arrays, Workload, as_is, make_workload, score
from dynamix_lab.tasks.convolution import adamw
from dynamix_lab.tasks.mnist1d import TUNING_SEEDS
from dynamix_lab.tasks.net_costs import net_costs
from dynamix_lab.virtual.cluster import VirtualCluster
from dynamix_lab.virtual.run import Snapshot, VirtualRun

SCENARIO = "paper-like"
POLICIES = ("reference", "lb_bsp", "goodput", "dynamix", "dynamix-paper")
PART_OF_PLATEAU = 0.98
LONGEST_S = 6_000.0
# Times `ScalingPlan.samples` that end a run which does not arrive. Static's own time is not known yet when it runs; the
# others get twice that time, in which large batches go through many samples.
MOST_OF_STATIC, MOST = 2.0, 10.0
PARTS = 30  # of a run's samples: snapshots, and points of its trajectory


@dataclass(frozen=True, slots=True)
class NetCase:
    """One net with one optimizer; `paper`: what the DYNAMIX paper reports, by number of nodes (None: it does not
    say).
    """

    name: str
    net: str
    optimizer: str
    workers: tuple[int, ...]
    lr_rule: str

    def workload(self, width: int | None) -> Workload:
        """By batches, as the paper's nets and as SGD needs it: normalised by groups they do not start reliably."""
        return make_workload(f"mnist1d-{self.net}", norm="batch", **({} if width is None else {"width": width}))

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """SGD at a fifth of the workload's rate: at a constant 0.05 scores swing by twenty points from one snapshot to
        the next.
        """
        return (
            SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4) if self.optimizer == "sgd" else adamw(parameters)
        )


CASES = (
    NetCase("vgg16-sgd", "vgg16", "sgd", (8, 16, 32), "adascale"),
    NetCase("vgg11-sgd", "vgg11", "sgd", (8,), "adascale"),
    NetCase("vgg11-adam", "vgg11", "adamw", (8,), "sqrt"),
)


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """What one call runs.

    cells       (case, W)
    sweep       static sizes per worker that are tried on the tuning seed
    batch_size  samples per worker at the start: the base batch is W times as many, the learning rate is for it
    samples     that every run trains on, and the sweep's plateau is taken from; longer only until the target
    train, test samples of mnist1d
    width       of the nets' first stage; None: theirs
    """

    cells: tuple[tuple[str, int], ...]
    policies: tuple[str, ...] = POLICIES
    seeds: tuple[int, ...] = (0, 1, 2)
    sweep: tuple[int, ...] = (8, 16, 32, 64, 128)
    batch_size: int = 16
    interval: int = 5
    samples: int = 90_000
    train: int = 24_000
    test: int = 4_000
    scored: int = 2_000
    width: int | None = 8
    tuning_seed: int = TUNING_SEEDS[0]

    @classmethod
    def of(
        cls,
        *,
        quick: bool,
        policies: Sequence[str] | None = None,
        workers: Sequence[int] | None = None,
        seeds: int | None = None,
        cases: Sequence[str] | None = None,
        samples: int | None = None,
    ) -> ScalingPlan:
        """The suite; `quick`: VGG-11 only, at 8 workers, little data, one seed, no figures worth keeping."""
        allowed = ("vgg11-sgd",) if quick else tuple(c.name for c in CASES)
        unknown = [name for name in cases or () if name not in allowed]
        if unknown:
            raise ConfigError("cases", unknown, ", ".join(allowed), "check the spelling")
        chosen = [c for c in CASES if not cases or c.name in cases]
        cells = tuple((c.name, w) for c in chosen for w in c.workers if not workers or w in workers)
        names = tuple(policies or POLICIES)
        if quick:
            less = {"samples": 12_000, "train": 4_000, "test": 1_000, "scored": 500}
            plan = cls((("vgg11-sgd", 8),), names, tuple(range(seeds or 1)), (16, 32), **less)
        else:
            plan = cls(cells, names, tuple(range(seeds or 3)))
        return plan if samples is None else replace(plan, samples=samples)

    def check(self) -> None:
        """Raises `ConfigError` before anything runs."""
        if not self.cells:
            allowed = ", ".join(f"{c.name} at {', '.join(map(str, c.workers))}" for c in CASES)
            raise ConfigError("workers", "none of the suite's", allowed, "choose among them")
        if self.samples < PARTS:
            raise ConfigError("samples", self.samples, f"{PARTS} or more", "90,000 is the suite's")
        for _, workers in self.cells:
            at_workers(SCENARIO, workers)
        for name in self.policies:
            make_policy(name, others=references(SCENARIO))

    def every(self) -> int:
        """Samples between snapshots."""
        return self.samples // PARTS


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """One run: a policy ("static:16", "reference:256", or a policy's name) on a cell of the plan with a seed."""

    cell: tuple[str, int]
    policy: str
    seed: int

    @property
    def key(self) -> str:
        """Names its file."""
        return f"{self.cell[0]}-{self.cell[1]}-{file_name(self.policy)}-seed{self.seed}"


@dataclass(frozen=True)
class ScalingSuite(Suite):
    """`dynamix bench scaling --cluster virtual`.

    For each case and W the sweep of static sizes runs first, on the tuning seed. It gives the target and the best
    static size, which the runs behind it need. Of those static is the first of each seed: its time bounds the others'.
    """

    plan: ScalingPlan
    name: str = "scaling"
    grows: ClassVar[frozenset[str]] = frozenset({"cells"})

    def facts(self) -> dict[str, Any]:
        hashes = {str(w): at_workers(SCENARIO, w).sha256 for _, w in self.plan.cells}
        about = {"cluster": "virtual", "mechanisms": {}, "scenario_sha256": hashes}
        return {**about, "seeds": list(self.plan.seeds), **self.bound_to()}

    def bound_to(self) -> dict[str, Any]:
        costs = {case.net: asdict(net_costs(case.net)) for case in CASES}
        return {"assumed_costs": described(), "net_costs": costs}

    def cells(self) -> list[Cell]:
        runs = [run for cell in self.plan.cells for run in (*_sweep(self.plan, cell), *_compared(self.plan, cell))]
        return [Cell(run.key, (run,)) for run in runs]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        (run,) = cell.what
        torch.set_num_threads(1)
        if run.seed == self.plan.tuning_seed:
            return one_run(self.plan, run, None, None)
        target, best = chosen_static(_swept(self.plan, run.cell, context.found))
        if run.policy == "static":
            return one_run(self.plan, replace(run, policy=f"static:{best}"), target, None)
        reached = reached_at(context.found[replace(run, policy="static").key], target)
        if run.policy == "reference":
            run = replace(run, policy=f"reference:{best * run.cell[1]}")
        return one_run(self.plan, run, target, None if reached is None else CENSOR_FACTOR * reached)

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        kept: dict[str, Any] = {}
        for cell in self.plan.cells:
            keys = [run.key for run in (*_sweep(self.plan, cell), *_compared(self.plan, cell))]
            kept |= {key: found[key] for key in keys} if all(key in found for key in keys) else {}
        return kept

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        there = [cell for cell in self.plan.cells if _sweep(self.plan, cell)[0].key in cells]
        return conclude({f"{case}-{w}": _gathered(self.plan, (case, w), cells) for case, w in there})

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(sections(result))

    def page(self, result: Mapping[str, Any]) -> str:
        return page(result)


def _sweep(plan: ScalingPlan, cell: tuple[str, int]) -> list[ScalingRun]:
    return [ScalingRun(cell, f"static:{size}", plan.tuning_seed) for size in plan.sweep]


def _compared(plan: ScalingPlan, cell: tuple[str, int]) -> list[ScalingRun]:
    names = ["static", *(name for name in plan.policies if name != "static")]
    return [ScalingRun(cell, name, seed) for seed in plan.seeds for name in names]


def _swept(plan: ScalingPlan, cell: tuple[str, int], found: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Runs of the sweep by size."""
    return {size: found[run.key] for size, run in zip(plan.sweep, _sweep(plan, cell), strict=True)}


def _gathered(plan: ScalingPlan, cell: tuple[str, int], found: Mapping[str, Any]) -> dict[str, Any]:
    """What `conclude` needs of one case at one W."""
    sweep = _swept(plan, cell, found)
    target, best = chosen_static(sweep)
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in _compared(plan, cell):
        runs.setdefault(run.policy, []).append(found[run.key])
    return {
        "target": target,
        "best_static": best,
        "sweep_s": {str(size): reached_at(run, target) for size, run in sweep.items()},
        "seeds": list(plan.seeds),
        "runs": runs,
        "samples": plan.samples,
        "sweep_cpu_s": sum(run["cpu_s"] for run in sweep.values()),
    }


def chosen_static(sweep: dict[int, dict[str, Any]]) -> tuple[float, int]:
    """(target: 98 % of the highest plateau, the size that reaches it first on the virtual clock)."""
    plateaus = {size: float(np.mean(run["score"][-3:])) for size, run in sweep.items()}
    target = round(PART_OF_PLATEAU * max(plateaus.values()), 4)
    times = {size: reached_at(run, target) for size, run in sweep.items()}
    arrived = {size: t for size, t in times.items() if t is not None}
    best = min(arrived, key=lambda size: arrived[size]) if arrived else max(plateaus, key=lambda size: plateaus[size])
    return target, best


def reached_at(run: dict[str, Any], target: float) -> float | None:
    """Virtual seconds until the target, None if it was not reached."""
    return time_to_target(run["time_s"], run["score"], target)


# ---------------------------------------------------------------- one run


def one_run(plan: ScalingPlan, planned: ScalingRun, target: float | None, bound_s: float | None) -> dict[str, Any]:
    """Train on the virtual clock: to `plan.samples`, and beyond only until the target or `bound_s`, at most `MOST`
    times.
    """
    case = next(c for c in CASES if c.name == planned.cell[0])
    workload, workers = case.workload(plan.width), planned.cell[1]
    data, net = workload.make_data(planned.seed, train=plan.train, test=plan.test), workload.make_model(planned.seed)
    bounds = Bounds.of(workers, workload.min_batch, 8 * plan.batch_size)
    scenario, disturbed_by = at_workers(SCENARIO, workers), 1000 + planned.seed
    world = NetEnv(scenario, net_costs(case.net), seed=disturbed_by, batch_size=plan.batch_size, longest_s=LONGEST_S)
    others = references(scenario, seed=disturbed_by, clock=lambda: float(world.clock_s[0]))
    policy = make_policy(planned.policy, others=others)
    began = time.process_time()
    with VirtualCluster(
        net,
        case.make_optimizer(net.parameters()),
        workload.loss,
        data.train,
        clusters=world,
        policy=policy,
        batch_size=plan.batch_size,
        bounds=bounds,
        interval=plan.interval,
        lr_rule=case.lr_rule,
        seed=planned.seed,
        collate_fn=as_is,
    ) as cluster:
        test = Arrays(data.test.inputs[: plan.scored], data.test.targets[: plan.scored])
        run = cluster.run(
            snapshot_samples=plan.every(),
            score=lambda model: score(workload, model, test),
            until=_end(plan, target, bound_s),
        )
    return {
        **told(run, plan),
        "policy": planned.policy,
        "seed": planned.seed,
        "cpu_s": round(time.process_time() - began, 1),
    }


def _end(plan: ScalingPlan, target: float | None, bound_s: float | None) -> Callable[[Snapshot], bool]:
    """Enough samples, and the time that static took to the target; then the target or its bound."""
    above = 0

    def ended(now: Snapshot) -> bool:
        nonlocal above
        above = above + 1 if target is not None and now.score >= target else 0
        if now.samples < plan.samples or target is None:
            return now.samples >= plan.samples
        if now.samples >= (MOST_OF_STATIC if bound_s is None else MOST) * plan.samples:
            return True
        early = bound_s is not None and now.time_s < bound_s / CENSOR_FACTOR
        return not early and (above >= 2 or (bound_s is not None and now.time_s > bound_s))

    return ended


def told(run: VirtualRun, plan: ScalingPlan) -> dict[str, Any]:
    """What is kept of a run: its snapshots, and the mean global batch in equal parts of the samples that all runs train
    on.
    """
    batch = run.counts.sum(1)
    before = np.cumsum(batch) - batch
    part = np.minimum(before * PARTS // plan.samples, PARTS)
    means = [float(batch[part == i].mean()) if (part == i).any() else None for i in range(PARTS)]
    return {
        "time_s": [round(s.time_s, 4) for s in run.snapshots],
        "samples": [s.samples for s in run.snapshots],
        "score": [round(s.score, 5) for s in run.snapshots],
        "global_batch": list(_filled(means)),
        "last_sizes": run.counts[-2 if len(run.counts) > 1 else -1].tolist(),
        "steps": len(batch),
        "step_s": round(float(run.step_s.mean()), 4),
        "wait_fraction": round(run.wait_fraction, 4),
    }


def _filled(means: list[float | None]) -> Iterator[float]:
    """A part that no step began in (a step may be longer than a part) has the batch of the part before."""
    last = next(m for m in means if m is not None)
    for mean in means:
        last = last if mean is None else round(mean, 1)
        yield last
