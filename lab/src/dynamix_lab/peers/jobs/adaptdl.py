"""AdaptDL without Kubernetes: one global batch for all, grown by goodput, learning rate by AdaScale.

Its environment variables define a job with a fixed number of replicas. It then never restarts, and asks no scheduler.
"""

from __future__ import annotations

import importlib
import os
import sys

from torch.nn.parallel import DistributedDataParallel as DDP

from .job import Run, Task, as_is


def main(path: str) -> None:
    task = Task(path)
    os.environ |= {
        "ADAPTDL_MASTER_ADDR": os.environ["MASTER_ADDR"], "ADAPTDL_MASTER_PORT": os.environ["MASTER_PORT"],
        "ADAPTDL_REPLICA_RANK": str(task.rank), "ADAPTDL_NUM_REPLICAS": str(task.world_size),
        "ADAPTDL_NUM_NODES": str(task.world_size),
    }  # fmt: skip
    adaptdl = importlib.import_module("adaptdl.torch")
    adaptdl.init_process_group("gloo")
    task.warm_up(DDP)  # its own model refuses a backward pass outside its loader
    net = task.model()
    optimizer = task.optimizer(net.parameters())
    model = adaptdl.AdaptiveDataParallel(net, optimizer)
    loader = adaptdl.AdaptiveDataLoader(task.data, batch_size=task.total, shuffle=True, collate_fn=as_is)
    least, most = task.settings["local_batch_bounds"]
    # Up to the largest global batch that the local bounds allow, it never accumulates gradients. Demanding this by
    # gradient_accumulation=False would fail in `np.int`, which NumPy has removed.
    loader.autoscale_batch_size(most * task.world_size, local_bsz_bounds=(least, most), gradient_accumulation=True)
    run = Run(task, net)
    run.begin()
    samples, going = 0, True
    for _ in adaptdl.remaining_epochs_until(1_000_000):
        for inputs, targets in loader:
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            samples += len(targets) * task.world_size
            going = run.goes_on(samples, loss.item(), [loader.current_local_bsz] * task.world_size)
            if not going:
                break
        if not going:
            break
    run.finish()


if __name__ == "__main__":
    main(sys.argv[1])
