"""Simulation-learned, fine-tuned and live-learned, compared on simulated jobs (`dynamix bench live-learning`).

Every job is one cluster with a learner of its own, as on a real job. During `windows` it learns while it serves, which
has a price; afterwards what it learned serves, frozen, in the same cluster under other disturbances. Both are paired
with the shipped policy in the same world.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies import Policy, make_policy
from dynamix.policies.learned.deviations import LiveConfig
from dynamix.policies.learned.online import LearningPolicy, net_of
from dynamix.policies.learned.policy import LearnedPolicy
from dynamix.policies.wrappers import after_answer
from dynamix_lab.papers.additive import AdditivePolicy
from dynamix_lab.simulator import ClusterEnv, Clusters, rollout, sample_family
from dynamix_lab.statistics import mean_interval
from dynamix_lab.training.evaluation import Tell

UNTRAINED: dict[str, Callable[[], Policy]] = {"dynamix": LearnedPolicy, "dynamix-paper": AdditivePolicy}
# From nothing there is no shipped policy to stay near; other settings as in fine-tuning.
FROM_NOTHING = LiveConfig(kl_limit=1e3, learning_rate=1e-3)
JOBS_SEED = 940_001


@dataclass(frozen=True, slots=True)
class LiveComparison:
    """What to compare on: `jobs` clusters of each family at each W; windows to learn in, windows to judge in."""

    policy: str = "dynamix-paper"
    families: tuple[str, ...] = ("pai-steady", "affine-slowdowns", "memory-cliff", "ar1-jitter")
    workers: tuple[int, ...] = (4,)
    jobs: int = 4
    windows: int = 300
    judged: int = 100
    seed: int = JOBS_SEED

    def __post_init__(self) -> None:
        if self.policy not in UNTRAINED:
            raise ConfigError("policy", self.policy, ", ".join(UNTRAINED), "rules have nothing to learn")


def compare(config: LiveComparison, *, tell: Tell = lambda what, done: None) -> dict[str, Any]:
    """For "fine-tuned" and "live-learned": log goodput over the shipped policy's, while learning and afterwards."""
    makers: dict[str, Callable[[], LearningPolicy]] = {
        "fine-tuned": lambda: LearningPolicy(make_policy(config.policy)),
        "live-learned": lambda: LearningPolicy(UNTRAINED[config.policy](), FROM_NOTHING),
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in makers}
    jobs = list(itertools.product(config.families, config.workers, range(config.jobs)))
    for i, (family, workers, job) in enumerate(jobs):
        tell(f"{family}, W={workers}, job {job + 1}", i / len(jobs))
        cluster = sample_family(family, config.jobs, workers, config.seed).take([job])
        _one_job(config, cluster, config.seed + job, makers, found)
    return {
        "policy": config.policy,
        "families": list(config.families),
        "workers": list(config.workers),
        "seed": config.seed,
        "jobs": len(jobs),
        "windows": config.windows,
        "against_shipped": {
            name: {key: _summary(values) for key, values in parts.items()} for name, parts in found.items()
        },
    }


def markdown(result: Mapping[str, Any]) -> str:
    """A row per learner: mean and 95 % interval of log goodput over the shipped policy's, and what learning took."""
    lines = ["| learner | while learning | afterwards | ms a window |", "|---" * 4 + "|"]
    for name, figures in result["against_shipped"].items():
        gains = ["{mean:+.4f} ({low:+.4f}, {high:+.4f})".format(**figures[k]) for k in ("while_learning", "afterwards")]
        lines.append("| " + " | ".join([name, *gains, f"{figures['ms_per_window']['mean']:.2f}"]) + " |")
    said = f"log goodput over that of the shipped {result['policy']}, mean and 95 % interval over {result['jobs']} jobs"
    return "\n".join([*lines, "", f"{said}; {result['windows']} windows to learn in."])


def _one_job(
    config: LiveComparison,
    cluster: Clusters,
    seed: int,
    makers: dict[str, Callable[[], LearningPolicy]],
    found: dict[str, dict[str, list[float]]],
) -> None:
    during = serve(make_policy(config.policy), cluster, seed, config.windows)
    after = serve(make_policy(config.policy), cluster, seed + 50_000, config.judged)
    for name, make in makers.items():
        learner = make()
        figures = {"while_learning": serve(learner, cluster, seed, config.windows) - during}
        frozen = make_policy(config.policy)
        net_of(frozen).load_state_dict(learner.net.state_dict())
        figures["afterwards"] = serve(frozen, cluster, seed + 50_000, config.judged) - after
        report = learner.report()["learning"]
        figures |= {key: report[key] for key in ("expected_loss", "divergence", "tried", "updates", "longest_s")}
        figures["ms_per_window"] = 1e3 * report["learning_s"] / report["windows"]
        for key, value in figures.items():
            found[name].setdefault(key, []).append(float(value))


def serve(policy: Policy, cluster: Clusters, seed: int, windows: int) -> float:
    """Log of the average goodput of one simulated job under a policy, which learns between decisions if it can."""
    env = ClusterEnv(cluster, seed=seed)
    for _ in itertools.islice(rollout(policy, env, windows), 1, None):
        after_answer(policy)
    return float(np.log(env.progress / env.clock_s).mean())


def _summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean over jobs and its 95 % interval."""
    found = mean_interval(values).to_dict()
    return {name: None if value is None else round(value, 5) for name, value in found.items()}
