"""Learns the numbers of the stigmergic rule: the cross-entropy method, on clusters that grow from 1 to 32 workers.

A candidate is one set of numbers for all workers. Its score is the time that they take for the progress that the lagged
reference makes meanwhile. All candidates of a generation get the same clusters. Fourteen numbers need no gradient
(Rubinstein 1999; de Boer et al. 2005).
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dynamix.policies.stigmergic.policy import RANGES, Parameters, StigmergicPolicy
from dynamix.window import Floats
from dynamix_lab.simulator import Clusters, LaggedReference
from dynamix_lab.training.curriculum import training_clusters
from dynamix_lab.training.evaluation import Factory, Tell, follow, times_to_common_progress

Speed = Callable[[Factory], Floats]
Rule = Callable[[Parameters], StigmergicPolicy]
VALIDATION_SEED = 905_001


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """The recipe. Seeds of training clusters are derived from `seed`; validation and bench seeds are never among them.

    stages       numbers of workers, stage after stage
    generations  of each stage
    tried        candidates of a generation
    kept         how many of them, the best, define the next generation
    worlds       per generation, with its stage's numbers of workers
    spread       standard deviation at the start, in logits of a number's range
    least        lower limit of the standard deviation
    rows         clusters times workers of a world; at least six clusters
    windows      decisions of a run
    intervals    steps of a window, of which each world draws one
    delays       steps until a decision applies, of which each world draws one
    noisier      factors on the noise scale of `training_clusters`, whose best batches are mostly below the base batch;
                 validation takes the first and the last
    validation_workers    numbers of workers in the clusters for comparing stages
    validation_clusters   clusters of up to 8 workers for comparing stages; fewer of more workers
    """

    stages: tuple[tuple[int, ...], ...] = ((1, 2), (2, 4, 8), (4, 8, 16, 32), (2, 8, 32))
    generations: tuple[int, ...] = (3, 6, 8, 8)
    tried: int = 20
    kept: int = 5
    worlds: int = 6
    spread: float = 0.6
    least: float = 0.15
    rows: int = 256
    windows: int = 26
    intervals: tuple[int, ...] = (5, 5, 10)
    delays: tuple[int, ...] = (1, 1, 4)
    noisier: tuple[float, ...] = (1.0, 1.0, 4.0, 16.0)
    validation_workers: tuple[int, ...] = (2, 8, 32)
    validation_clusters: int = 80


def train(
    config: SearchConfig | None = None, seed: int = 0, *, rule: Rule = StigmergicPolicy, progress: Tell | None = None
) -> StigmergicPolicy:
    """The best on validation clusters among the numbers set by hand and each stage's mean. Same seed, same numbers.

    rule   uses the numbers during training: the policy itself, or a variant from which something is removed
    """
    c, tell = config or SearchConfig(), progress or (lambda what, done: None)
    rng = np.random.default_rng([seed, 31])
    mean = to_logits(Parameters())
    spread = np.full(len(mean), c.spread)
    best, score = Parameters(), _validate(c, rule, Parameters())
    scores, done = [round(score, 4)], 0
    tell(f"by hand: {score:.4f}", 0.0)
    for stage, workers in enumerate(c.stages):
        spread = np.maximum(spread, 0.5 * c.spread)  # a new stage may need other numbers
        for _ in range(c.generations[stage]):
            worlds = [_world(c, int(w), rng) for w in rng.choice(workers, c.worlds)]
            drawn = mean + spread * rng.normal(size=(c.tried, len(mean)))
            drawn[0] = mean
            values = np.array([np.mean([_judge(rule, from_logits(z), world) for world in worlds]) for z in drawn])
            elite = drawn[np.argsort(-values)[: c.kept]]
            mean = 0.3 * mean + 0.7 * elite.mean(0)
            spread = np.maximum(0.5 * spread + 0.5 * elite.std(0), c.least)
            done += 1
            tell(f"{workers} workers, best of {c.tried}: {values.max():.4f}", done / sum(c.generations))
        candidate = from_logits(mean)
        scores.append(round(value := _validate(c, rule, candidate), 4))
        if value > score:
            best, score = candidate, value
    about = {"training": json.loads(json.dumps(dataclasses.asdict(c))), "seed": seed, "validation": scores}
    return StigmergicPolicy(best, about=about)


def to_logits(parameters: Parameters) -> Floats:
    """The place of each number in its range, as a logit, (n,)."""
    ranges = np.array(list(RANGES.values()))
    part = (np.array(list(dataclasses.asdict(parameters).values())) - ranges[:, 0]) / (ranges[:, 1] - ranges[:, 0])
    part = np.clip(part, 0.02, 0.98)
    return np.asarray(np.log(part / (1 - part)))


def from_logits(logits: Floats) -> Parameters:
    """The inverse of `to_logits`.

    >>> round(from_logits(to_logits(Parameters())).push, 6)
    1.0
    """
    parts = zip(RANGES.items(), 1 / (1 + np.exp(-logits)), strict=True)
    return Parameters(**{name: low + (high - low) * float(part) for (name, (low, high)), part in parts})


def _speed_on(clusters: Clusters, seed: int, windows: int, interval: int = 5, delay: int = 1) -> Speed:
    """Measures policies on clusters: log of the lagged reference's time over the policy's, (C,); above 0 is faster."""
    run = partial(follow, clusters=clusters, seed=seed, windows=windows, interval=interval, delay=delay)
    reference = run(LaggedReference)

    def speed(make: Factory) -> Floats:
        times = times_to_common_progress({"reference": reference, "own": run(make)})
        return np.asarray(np.log(times["reference"] / times["own"]))

    return speed


def _world(c: SearchConfig, workers: int, rng: np.random.Generator) -> Speed:
    seed, interval, delay = int(rng.integers(2**31)), int(rng.choice(c.intervals)), int(rng.choice(c.delays))
    clusters = training_clusters(min(max(c.rows // workers, 6), 32), workers, seed)
    clusters = _noisier(clusters, float(rng.choice(c.noisier)))
    return _speed_on(clusters, seed, c.windows, interval, delay)


def _noisier(clusters: Clusters, by: float) -> Clusters:
    """The same clusters with the noise scale multiplied by `by`, so that larger batches are best."""
    return dataclasses.replace(clusters, noise_start=clusters.noise_start * by)


def _judge(rule: Rule, parameters: Parameters, world: Speed) -> float:
    """Mean over clusters. The slowest tenth counts twice, so that no cluster is neglected."""
    speed = world(lambda _: rule(parameters))
    return float(speed.mean() + 0.25 * np.quantile(speed, 0.1))


def _validate(c: SearchConfig, rule: Rule, parameters: Parameters) -> float:
    """Reference's time / own time on clusters never used for training: geometric mean over W, clusters and noise."""
    logs = []
    for w in c.validation_workers:
        clusters = training_clusters(max(c.validation_clusters * 8 // max(w, 8), 6), w, VALIDATION_SEED)
        for noise in dict.fromkeys((c.noisier[0], c.noisier[-1])):
            speed = _speed_on(_noisier(clusters, noise), VALIDATION_SEED, c.windows)
            logs.append(speed(lambda _: rule(parameters)).mean())
    return float(np.exp(np.mean(logs)))
