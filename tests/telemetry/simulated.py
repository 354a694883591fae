"""Events files of simulated runs: what a job would have written, in a moment.

python -m tests.telemetry.simulated FOLDER WORKERS WINDOWS [POLICY]
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.events.records import EventLog
from dynamix.policies import make_policy
from dynamix.policies.wrappers import report_of
from dynamix.window import PER_CLUSTER, PER_WORKER, Window
from dynamix_lab.simulator import sample_clusters
from dynamix_lab.simulator.env import ClusterEnv


def simulate(
    path: Path,
    *,
    workers: int = 4,
    windows: int = 40,
    policy: str = "goodput",
    seed: int = 3,
    distinct: int = 1000,
    **labels: Any,
) -> Path:
    """An events file at `path`, of `windows` windows; `labels` are added to each line. Above `distinct` windows the
    first so many repeat: long files cost little then."""
    env = ClusterEnv(sample_clusters(1, workers, seed), seed=seed)
    answering = make_policy(policy)
    window, lines = env.reset(), []
    for _ in range(min(windows, distinct)):
        sizes = np.asarray(answering.decide(window, env.bounds))
        lines.append((one(window), sizes[0], float(env.clock_s[0]), report_of(answering)))
        window = env.step(sizes)
    samples = 0.0
    with EventLog(path) as log:
        for index in range(windows):
            seen, sizes, time_s, about = lines[index % len(lines)]
            again = index // len(lines)
            time_s += again * lines[-1][2]
            step = seen.step + again * lines[-1][0].step
            samples += 5 * float(seen.batch_size.sum())
            done = 1.0 - np.exp(-samples / 4e4)
            loss = 2.3 - 1.9 * done + 0.05 * np.sin(1.7 * index)
            each = np.full(workers, loss)
            seen = dataclasses.replace(seen, loss=each, accuracy=0.1 + 0.8 * done + 0.0 * each, step=step)
            kept = np.array_equal(sizes, seen.batch_size)
            told = {"decision": "keep" if kept else "new", "allocation": sizes.tolist(), "from_step": 5 * index + 6}
            at = {"samples_seen": int(samples), "time_s": time_s}
            log.write(window_index=index, window=seen, **told, **at, **of_one(about), **labels)
    return path


def of_one(about: dict[str, Any]) -> dict[str, Any]:
    """The report of a policy of one cluster, without the dimension of clusters."""
    return {key: {k: v[0] if isinstance(v, list) else v for k, v in told.items()} for key, told in about.items()}


def one(window: Window) -> Window:
    """The only cluster of a window."""
    each = {name: getattr(window, name)[0] for name in (*PER_WORKER, *PER_CLUSTER)}
    return Window.of(window.batch_size[0], **each)


if __name__ == "__main__":
    folder, workers, windows, *rest = sys.argv[1:]
    simulate(Path(folder) / "events.jsonl", workers=int(workers), windows=int(windows), policy=(rest or ["goodput"])[0])
