"""Small real trainings whose seconds are computed: what an agent that sets batch and rate learns on.

A job trains a net of `dynamix_lab.tasks` on a cluster that is two numbers: what a step of the first batch takes, and
the part of it that does not depend on the batch (exchanges, fixed times). Shares are taken to be exact, as `balance`
has them. Seconds are counted in steps of the first batch. A batch other than the first one spends the budget in
progress, as `Controller.budget` does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, AdamW, Optimizer

from dynamix.window import Floats
from dynamix_lab.tasks import Data, Workload, make_workload, score

STEPS = 5  # of a window: an agent decides after each
HELD_OUT = 1000
SMOOTH = 0.8  # of noise and signal, by window: norms are measured in its first step, as in a live job
LARGEST = 16.0  # times the first batch
GROWS = 1.15  # at most, in a window
CORRECTS = 1.5  # at most, of the log of a batch or rate
MULTIPLES = (0.35, 0.6, 1.0, 1.7, 2.8)  # of the budget: the curve that an end is read from
RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
FEATURES = 8

# kind -> workload, numbers that are drawn for it, base rate of SGD and of AdamW at 128 samples, budget
KINDS: dict[str, tuple[str, dict[str, tuple[float, float]], float, float, int]] = {
    "teacher": ("teacher", {"noise": (0.5, 3.0)}, 0.05, 0.004, 32_000),
    "classes": ("teacher-classes", {"noise": (0.2, 0.8)}, 0.1, 0.004, 32_000),
    "mnist1d": ("mnist1d-noisy-mlp", {"noise": (0.0, 0.6)}, 0.1, 0.004, 32_000),
    "bytes": ("pysource-pieces", {}, 0.5, 0.008, 24_000),
    "pulse": ("pulse", {}, 0.1, 0.016, 24_000),
    "lstm": ("pysource-windows-lstm", {}, 0.7, 0.03, 30_000),
    "ratings": ("ratings-dense", {}, 0.5, 0.08, 64_000),
}
LEARNED, HELD_BACK = ("teacher", "classes", "mnist1d", "bytes"), ("pulse", "lstm", "ratings")
"""Kinds that an agent may meet while it learns, and those that nothing looks at before the end."""
WIDTHS = (32, 64, 128, 192)
DATA_SEEDS = 4  # sets of data of a kind


@dataclass(frozen=True, slots=True)
class RealJob:
    """A training with everything that decides how it goes.

    kind        of `KINDS`
    options     of the workload: noise, width
    optimizer   "sgd" (momentum 0.9) or "adamw"
    batch       the global batch that it begins with
    budget      samples of that batch
    overhead    the part of a step's time at that batch that no batch changes
    moves       times in parts of the budget at which `overhead` changes, and to what
    rate        the best one for `batch` under a cosine
    seed        of data, weights and order
    curve       coefficients of the score that a fixed batch ends with, over log(time / the budget's)
    """

    kind: str
    options: tuple[tuple[str, float], ...]
    optimizer: str
    batch: int
    budget: int
    overhead: float
    moves: tuple[tuple[float, float], ...]
    seed: int
    rate: float = 0.0
    curve: tuple[float, ...] = ()

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> RealJob:
        """The inverse of `dataclasses.asdict`, also after JSON."""
        pairs = {name: tuple(tuple(one) for one in plain[name]) for name in ("options", "moves")}
        return cls(**{**plain, **pairs, "curve": tuple(plain["curve"])})

    def workload(self) -> Workload:
        """Its net, data and score."""
        return make_workload(KINDS[self.kind][0], **dict(self.options))

    def equivalent(self, reached: float) -> float:
        """log of the time, over the budget's, in which a fixed batch would end with that score."""
        ends = np.linspace(math.log(0.15), math.log(6.0), 400)
        scores = np.maximum.accumulate(np.polyval(self.curve, ends))
        return float(ends[min(int(np.searchsorted(scores, reached)), len(ends) - 1)])


@dataclass(slots=True)
class Seen:
    """What is known at the end of a window; `features` is for agents, `rule` the batch that goodput would take."""

    features: Floats
    rule: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The global batch of the next window, and what the rule's rate is multiplied by."""

    batch: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class End:
    """How a training ended: seconds over those of a fixed batch, and the score."""

    time: float
    score: float


Decide = Callable[[Seen], Choice]
Rule = Callable[["RealJob", Seen], float]


@dataclass(slots=True)
class _Noise:
    """Gradient noise of a job, smoothed: trace of the covariance, and the squared norm of the true gradient."""

    noise: float = 0.0
    signal: float = 0.0
    weight: float = 0.0

    def measure(
        self,
        workload: Workload,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> float:
        """Leaves the batch's mean gradient in `.grad`; gives the loss.

        |g|^2 of the first half and of the whole tell noise from signal (McCandlish et al., arXiv 1812.06162).
        """
        half, batch = len(inputs) // 2, len(inputs)
        (workload.loss(model(inputs[:half]), targets[:half]) / 2).backward()
        half_sq = 4 * _norm_sq(parameters)
        loss = workload.loss(model(inputs[half:]), targets[half:]) / 2
        loss.backward()
        whole_sq = _norm_sq(parameters)
        self.noise = SMOOTH * self.noise + (1 - SMOOTH) * (half_sq - whole_sq) * batch
        self.signal = SMOOTH * self.signal + (1 - SMOOTH) * (2 * whole_sq - half_sq)
        self.weight = SMOOTH * self.weight + 1 - SMOOTH
        return 2 * loss.item()

    @property
    def scale(self) -> float:
        """The noise scale in samples, from 1 to a million."""
        return min(max(self.noise, 1e-12) / max(self.signal, 1e-12), 1e6) if self.weight else 1.0


def fixed(job: RealJob, seen: Seen) -> float:
    """The first batch to the end: `balance`."""
    return float(job.batch)


def goodput(job: RealJob, seen: Seen) -> float:
    """The batch at which most is learned in a second, never below the first: `adapt`."""
    return max(seen.rule, float(job.batch))


def corrected(job: RealJob, rule: Rule, correction: Callable[[Seen], tuple[float, float]] | None = None) -> Decide:
    """The rule's batch and rate, times the exponentials of two corrections, batch first. A batch grows slowly."""
    at = float(job.batch)

    def decide(seen: Seen) -> Choice:
        nonlocal at
        batch, rate = correction(seen) if correction else (0.0, 0.0)
        at = min(max(rule(job, seen) * math.exp(min(max(batch, -CORRECTS), CORRECTS)), job.batch / 2), at * GROWS)
        return Choice(at, math.exp(min(max(rate, -CORRECTS), CORRECTS)))

    return decide


def train(job: RealJob, decide: Decide, *, multiple: float = 1.0, repeat: int = 0) -> End:
    """One training to the end of `multiple` of its budget. `repeat` draws other weights and another order."""
    workload, data = job.workload(), data_of(job)
    outside = torch.random.get_rng_state()
    try:
        return _train(job, workload, data, decide, job.budget * multiple, repeat)
    finally:
        torch.random.set_rng_state(outside)


def _train(job: RealJob, workload: Workload, data: Data, decide: Decide, budget: float, repeat: int) -> End:
    seed = 1000 * job.seed + repeat
    model = workload.make_model(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(job, parameters)
    order, known = torch.Generator().manual_seed(seed), _Noise()
    choice, progress, time, loss_slow, loss_fast, first = Choice(float(job.batch)), 0.0, 0.0, 0.0, 0.0, 0.0
    n, window = len(data.train), 0
    inputs, targets = data.train.inputs, data.train.targets
    while progress < budget:
        batch = max(min(round(choice.batch), int(LARGEST * job.batch), 8192), 8) & ~1
        overhead = _overhead(job, progress / budget)
        each_s = overhead + (1 - job.overhead) * batch / job.batch
        for step in range(STEPS):
            part = min(progress / budget, 1.0)
            gain = batch / job.batch * (known.scale + job.batch) / (known.scale + batch)
            rule = gain if job.optimizer == "sgd" else math.sqrt(batch / job.batch)
            rate = job.rate * rule * choice.factor * (0.01 + 0.99 * (1 + math.cos(math.pi * part)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = rate
            chosen = torch.randint(n, (batch,), generator=order)
            optimizer.zero_grad()
            if step == 0:
                value = known.measure(workload, model, parameters, inputs[chosen], targets[chosen])
            else:
                loss = workload.loss(model(inputs[chosen]), targets[chosen])
                loss.backward()
                value = loss.item()
            if not math.isfinite(value):
                return End(time / (job.budget / job.batch), 0.0)
            optimizer.step()
            if first == 0.0:
                first = loss_slow = loss_fast = value
            loss_fast, loss_slow = 0.8 * loss_fast + 0.2 * value, 0.96 * loss_slow + 0.04 * value
            progress += job.batch * gain
            time += each_s
            if progress >= budget:
                break
        window += 1
        choice = decide(
            _seen(job, known, progress / budget, overhead, choice, loss_fast / loss_slow, loss_fast / first)
        )
    held = type(data.test)(data.test.inputs[:HELD_OUT], data.test.targets[:HELD_OUT])
    return End(time / (job.budget / job.batch), score(workload, model, held))


def _norm_sq(parameters: Sequence[torch.nn.Parameter]) -> float:
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    return float(torch.stack(norms).square().sum())


def _seen(job: RealJob, known: _Noise, part: float, overhead: float, choice: Choice, falls: float, loss: float) -> Seen:
    scale, batch = known.scale, job.batch
    # argmax over B of (scale + batch) / (scale + B) * B / (overhead + slope B): B^2 = scale * overhead / slope
    slope = (1 - job.overhead) / batch
    rule = min(max(math.sqrt(scale * overhead / slope), batch / 2), LARGEST * batch)
    features = np.array(
        [
            1.0,
            min(part, 1.0) - 0.5,
            math.log(scale / batch) / 3,
            math.log(rule / batch),
            (min(part, 1.0) - 0.5) * math.log(scale / batch) / 3,
            overhead,
            max(min(10 * math.log(max(falls, 1e-6)), 3.0), -3.0),
            math.log(max(loss, 1e-3)),
        ]
    )
    return Seen(features, rule)


def _overhead(job: RealJob, part: float) -> float:
    found = job.overhead
    for at, value in job.moves:
        if part >= at:
            found = value
    return found


def _optimizer(job: RealJob, parameters: list[torch.nn.Parameter]) -> Optimizer:
    if job.optimizer == "sgd":
        return SGD(parameters, lr=1.0, momentum=0.9, foreach=True)
    return AdamW(parameters, lr=1.0, foreach=True)


@functools.lru_cache(maxsize=64)
def _data(workload: str, options: tuple[tuple[str, float], ...], seed: int) -> Data:
    return make_workload(workload, **dict(options)).make_data(seed)


def data_of(job: RealJob) -> Data:
    """Its data: one of a few sets of each kind."""
    return _data(KINDS[job.kind][0], job.options, 9003 + job.seed % DATA_SEEDS)


def drawn(kinds: Sequence[str], count: int, seed: int) -> list[RealJob]:
    """Jobs of these kinds in turn, without their rates and curves (`prepared`)."""
    rng, jobs = np.random.default_rng(seed), list[RealJob]()
    for i in range(count):
        kind = kinds[i % len(kinds)]
        _, ranges, _, _, budget = KINDS[kind]
        options = {name: round(float(rng.uniform(*ends)), 1) for name, ends in ranges.items()}
        if kind in ("teacher", "classes"):
            options["width"] = int(rng.choice(WIDTHS))
        overhead, other = (float(rng.uniform(0.1, 0.9)) for _ in range(2))
        moves = ((round(float(rng.uniform(0.2, 0.8)), 2), round(other, 2)),) if rng.random() < 0.3 else ()
        jobs.append(
            RealJob(
                kind,
                tuple(options.items()),
                str(rng.choice(["sgd", "adamw"])),
                int(rng.choice([64, 128, 256])),
                budget,
                round(overhead, 2),
                moves,
                int(rng.integers(1, 1_000_000)),
            )
        )
    return jobs
