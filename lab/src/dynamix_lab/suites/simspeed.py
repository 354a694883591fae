"""Simulated worker-steps per second at several W: `dynamix bench simspeed`.

A benchmark, not a timed test: shared machines are noisy.
"""

from __future__ import annotations

import threading
import time

from dynamix_lab.simulator import ClusterEnv, sample_family

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
