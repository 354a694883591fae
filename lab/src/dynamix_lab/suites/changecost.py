"""What the first steps at a batch size never met before cost: `dynamix bench changecost [WORKLOAD]`.

The processor library prepares its kernels for every new shape and keeps them, so a size costs once. CPU time of this
process, so what else the machine does hardly matters; one thread, whole optimizer steps, sizes in random order.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from dynamix_lab.tasks import make_workload

STEPS = 4


def change_cost(name: str, *, sizes: range = range(24, 73), seed: int = 0) -> dict[str, float]:
    """Median CPU seconds of a step at a new size (`first`), of the later ones there (`later`), and of the first step
    when a size comes again (`again`)."""
    workload, rng = make_workload(name), np.random.default_rng(seed)
    torch.set_num_threads(1)
    data = workload.make_data(seed, train=1000, test=100).train
    model = workload.make_model(seed)
    optimizer = workload.make_optimizer(model.parameters())

    def step(size: int) -> float:
        inputs, targets = data.__getitems__(rng.integers(0, 1000, size).tolist())
        began = time.process_time()
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        return time.process_time() - began

    for _ in range(STEPS):
        step(sizes.stop)  # the first calls of all prepare more than a shape
    rounds = [[[step(int(size)) for _ in range(STEPS)] for size in rng.permutation(sizes)] for _ in range(2)]
    first, again = ([times[0] for times in of_round] for of_round in rounds)
    later = [t for of_round in rounds for times in of_round for t in times[1:]]
    named = {"first": first, "again": again, "later": later}
    return {name: statistics.median(times) for name, times in named.items()}
