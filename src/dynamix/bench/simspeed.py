"""Simulated worker-steps per second at several W, and milliseconds per decision of the learned policy at W = 1024.

`dynamix bench simspeed` prints them. A benchmark, not a timed test: shared machines are noisy.
"""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import torch

from dynamix.policies.learned import LearnedPolicy
from dynamix.simulator import ClusterEnv, sample_family
from dynamix.window import Bounds, Window

# (clusters, workers): the goal's size, the same number of workers in fewer clusters, and one large cluster.
SIZES = ((256, 32), (8, 1024), (1, 10_000))
GOAL_STEPS_PER_S = 2_000_000


def simulator_speeds(family: str = "affine-slowdowns") -> list[dict[str, float]]:
    """`simulator_speed` at every size."""
    return [{"clusters": c, "workers": w, **simulator_speed(family=family, clusters=c, workers=w)} for c, w in SIZES]


def simulator_speed(
    *, family: str = "affine-slowdowns", clusters: int = 256, workers: int = 32, windows: int = 20, threads: int = 2
) -> dict[str, float]:
    """Decisions and optimizer steps, each times workers, per second; one environment per thread, no learning."""
    envs = [ClusterEnv(sample_family(family, clusters, workers, i), seed=i) for i in range(threads)]

    def roll(env: ClusterEnv) -> None:
        window = env.reset()
        for _ in range(windows):
            window = env.step(window.batch_size)

    roll(envs[0])
    started = time.perf_counter()
    rollers = [threading.Thread(target=roll, args=(env,)) for env in envs]
    for roller in rollers:
        roller.start()
    for roller in rollers:
        roller.join()
    elapsed_s = time.perf_counter() - started
    decided = threads * clusters * workers * windows
    steps = envs[0].interval + envs[0].delay
    return {"worker_decisions_per_s": decided / elapsed_s, "worker_steps_per_s": decided * steps / elapsed_s}


def decision_ms(*, workers: int = 1024, repeats: int = 100) -> dict[str, float]:
    """Median and least wall milliseconds, and median CPU milliseconds, of one decision (features, memory, network, projection) on one CPU thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rng, policy, bounds = np.random.default_rng(0), LearnedPolicy(), Bounds.of(workers)
        sizes, taken = np.full(workers, 128), []
        worked: list[float] = []
        for _ in range(repeats + 5):
            compute = 0.1 * sizes / 128 * np.exp(0.3 * rng.normal(size=workers))
            window = Window.of(sizes, compute=compute, communication=0.03, noise=5e4, signal=1.0, cpu=0.5)
            started, busy = time.perf_counter(), time.thread_time()
            sizes = policy.decide(window, bounds)
            taken.append(time.perf_counter() - started)
            worked.append(time.thread_time() - busy)
    finally:
        torch.set_num_threads(threads)
    took_ms, cpu_ms = np.array(taken[5:]) * 1e3, float(np.median(worked[5:])) * 1e3
    return {
        "median": round(float(np.median(took_ms)), 3),
        "least": round(float(took_ms.min()), 3),
        "cpu": round(cpu_ms, 3),
    }


def main() -> None:
    """Print both figures."""
    print(json.dumps({"simulator": simulator_speeds(), "decision_ms_1024_workers": decision_ms()}, indent=1))


if __name__ == "__main__":
    main()
