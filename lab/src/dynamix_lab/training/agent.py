"""An agent that sets the global batch and the learning rate, paid at the end of a budget: time and score as one.

`learn_cma` (CMA-ES, Hansen, arXiv 1604.00772) searches the weights of a linear agent, `learn_ppo` those of a small
network. Both meet whole trainings of real jobs (`real_jobs`), drawn from kinds that the test never has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch

from dynamix.window import Floats
from dynamix_lab.statistics import Interval, mean_interval
from dynamix_lab.training.real_jobs import (
    FEATURES,
    KINDS,
    LARGEST,
    MULTIPLES,
    RATES,
    Choice,
    Decide,
    RealJob,
    Seen,
    fixed,
    goodput,
    train,
)

LEAST, MOST = math.log(0.5), math.log(LARGEST)  # of log(batch / first batch)
RATE_WITHIN = 1.5  # of log(factor on the rule's rate)
RULES: Mapping[str, Callable[[RealJob], Decide]] = {"balance": fixed, "adapt": goodput}


def prepared(job: RealJob) -> RealJob | None:
    """The job with its best rate and the curve of a fixed batch; None if nothing can be read from its curve."""
    base = KINDS[job.kind][2 if job.optimizer == "sgd" else 3]
    base *= job.batch / 128 if job.optimizer == "sgd" else math.sqrt(job.batch / 128)
    tried = [dataclasses.replace(job, rate=base * factor) for factor in RATES]
    scores = [np.mean([train(one, fixed(one), repeat=repeat).score for repeat in (900, 901)]) for one in tried]
    best = tried[int(np.argmax(scores))]
    ends = [(math.log(m), train(best, fixed(best), multiple=m, repeat=r).score) for m in MULTIPLES for r in (902, 903)]
    at, reached = np.array(ends).T
    curve = np.polyfit(at, reached, 2)
    rise = float(np.polyval(curve, math.log(2.0)) - np.polyval(curve, math.log(0.5)))
    scatter = float(np.std(reached - np.polyval(curve, at)))
    if rise < 4 * scatter or rise < 0.01:  # a score that time hardly changes says nothing about time
        return None
    return dataclasses.replace(best, curve=tuple(float(c) for c in curve))


def linear(weights: Floats, job: RealJob) -> Decide:
    """The agent of `learn_cma`: weights (2, FEATURES) of batch and rate."""

    def decide(seen: Seen) -> Choice:
        batch, rate = weights.reshape(2, FEATURES) @ seen.features
        return chosen(job, float(batch), float(rate))

    return decide


def chosen(job: RealJob, batch: float, rate: float) -> Choice:
    """A choice from two logs, within what is allowed."""
    size = job.batch * math.exp(min(max(batch, LEAST), MOST))
    return Choice(size, math.exp(min(max(rate, -RATE_WITHIN), RATE_WITHIN)))


def cost(job: RealJob, decide: Decide, repeat: int) -> float:
    """log of the time that was taken, over that in which a fixed batch ends with the same score."""
    end = train(job, decide, repeat=repeat)
    return math.log(end.time) - job.equivalent(end.score)


def of_weights(weights: Floats, job: RealJob, repeat: int) -> float:
    """`cost` of the linear agent; in a worker process."""
    torch.set_num_threads(1)
    return cost(job, linear(weights, job), repeat)


def of_rule(name: str, job: RealJob, repeat: int) -> float:
    """`cost` of a rule."""
    torch.set_num_threads(1)
    return cost(job, RULES[name](job), repeat)


def start() -> Floats:
    """Weights of an agent that takes the rule's batch and rate."""
    weights = np.zeros((2, FEATURES))
    weights[0, 3] = 1.0
    return weights.reshape(-1)


def learn_cma(
    jobs: Sequence[RealJob],
    pool: Executor,
    *,
    generations: int,
    population: int,
    batch: int,
    seed: int,
    tell: Callable[[int, Floats, float], None],
) -> Floats:
    """Weights after so many generations; `batch` jobs judge each, the same for all candidates of a generation."""
    import cma

    search = cma.CMAEvolutionStrategy(start(), 0.3, {"seed": seed, "popsize": population, "verbose": -9})
    rng = np.random.default_rng(seed)
    for generation in range(generations):
        candidates = search.ask()
        judges = [jobs[i] for i in rng.choice(len(jobs), batch, replace=False)]
        asked = [(w, job, generation) for w in candidates for job in judges]
        costs = np.array(list(pool.map(of_weights, *zip(*asked, strict=True), chunksize=4))).reshape(population, batch)
        # cut: one ruined training must not outweigh all others
        search.tell(candidates, np.clip(costs, -2, 2).mean(1))
        tell(generation, np.asarray(search.result.xfavorite), float(np.clip(costs, -2, 2).mean()))
    return np.asarray(search.result.xfavorite)
