"""Runs on each rank of `dynamix bench overhead`: several jobs in one process, a block of steps in turn.

Every row has its own model, optimizer, process group, loader and, if it is a policy, controller for the whole launch.
Only one trains at a time. All ranks pause between blocks, so that a decision begun in one block does not run in the
next one's time.

(DDP reads the annotations of a hook as objects, so they are not postponed here.)
"""

import datetime
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dynamix.runtime.controller import Controller
from dynamix_lab.statistics import balanced_order, mean_interval
from dynamix_lab.tasks import as_is

RANKS = 2
PLAIN, AGAIN, HOOK = "ddp", "ddp-again", "ddp-hook"
BATCH = 256  # samples per rank and step; policies may move one of them, so that all rows compute the same
INTERVAL = 5  # the controller's default: steps per window
FEATURES, CLASSES, STORED = 32, 10, 4096
REST_S = 0.03
TIMEOUT = datetime.timedelta(seconds=120)
WIDEST = 8192
CLOCKS = ("wall_s", "cpu_s", "thread_s")
ENOUGH = 0.01  # half width of A/A's interval of thread time, relative


@dataclass(frozen=True, slots=True)
class Blocks:
    """How one launch is timed.

    rows     names: `PLAIN`, `AGAIN`, `HOOK`, or a policy
    width    of the two hidden layers
    warm_up  untimed steps of each row
    steps    per block
    rounds   least number of blocks per row
    most     largest number of blocks; none follow once `settled`
    seed     of the order of rows
    """

    rows: tuple[str, ...]
    width: int
    warm_up: int
    steps: int
    rounds: int
    most: int
    seed: int

    @property
    def samples(self) -> int:
        """A data set so long that no epoch ends while blocks are timed."""
        return (self.warm_up + self.steps * self.most + 2 * INTERVAL) * BATCH * RANKS


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """A data set of any length, of few stored samples. `__getitems__` takes a batch by one index, as a loader of arrays
    would.
    """

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.length = length
        self.inputs = torch.randn(STORED, FEATURES, generator=generator)
        self.targets = torch.randint(CLASSES, (STORED,), generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % STORED], self.targets[index % STORED]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices) % STORED
        return self.inputs[chosen], self.targets[chosen]


def network(width: int) -> nn.Module:
    """Two hidden layers of `width`; the same initial weights each time."""
    torch.manual_seed(0)
    hidden = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


class RowJob:
    """The job of one row. A collective call: all ranks make the same rows in the same order."""

    def __init__(self, name: str, width: int, samples: int) -> None:
        group = dist.new_group(timeout=TIMEOUT)
        net = network(width)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
        model = DDP(net, process_group=group)
        data = Repeated(samples)
        self.controller: Controller | None = None
        if name in (PLAIN, AGAIN, HOOK):
            sampler: DistributedSampler[Any] = DistributedSampler(data, RANKS, dist.get_rank(group))
            self.loader = DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=as_is)
            if name == HOOK:
                model.register_comm_hook(group, bare_hook)
        else:
            self.controller = Controller(
                name,
                BATCH,
                global_batch="fixed",
                min_batch_size=BATCH - 1,
                max_batch_size=BATCH + 1,
                interval=INTERVAL,
                process_group=group,
            )
            batches = self.controller.batch_sampler(data)
            self.loader = DataLoader(data, batch_sampler=batches, collate_fn=as_is)
            model = self.controller.wrap(model, self.optimizer)
        self.model = model
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def train(self, steps: int) -> None:
        """Run the user's loop for `steps` steps."""
        if self._batches is None:
            self._batches = iter(self.loader)
        for _ in range(steps):
            inputs, targets = next(self._batches)
            logits = self.model(inputs)
            loss = F.cross_entropy(logits, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.controller is not None:
                self.controller.step(loss=loss, logits=logits, target=targets)

    @property
    def call_s(self) -> float:
        """Seconds spent inside `controller.step()` so far."""
        return 0.0 if self.controller is None else self.controller.overhead_s

    def close(self) -> None:
        """End the controller's threads."""
        if self.controller is not None:
            self.controller.close()


def bare_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own exchange, called from Python: the least cost of any communication hook."""
    return default_hooks.allreduce_hook(group, bucket)


def timed(job: RowJob, steps: int, rest_s: float = REST_S) -> tuple[float, float, float]:
    """Clock seconds of both ranks; this rank's processor seconds of all threads, and of the training thread."""
    time.sleep(rest_s)
    dist.barrier()
    began, worked, trained = time.perf_counter(), time.process_time(), time.thread_time()
    job.train(steps)
    trained = time.thread_time() - trained
    dist.barrier()
    return time.perf_counter() - began, time.process_time() - worked, trained


def settled(thread_s: Mapping[str, Sequence[float]]) -> bool:
    """Whether A/A's interval over blocks is narrow enough, by rank 0's `thread_s`. A collective call."""
    ratios = mean_interval(np.log(np.array(thread_s[AGAIN]) / np.array(thread_s[PLAIN])))
    said = torch.tensor([float(ratios.high - ratios.low)])
    dist.broadcast(said, 0)
    return float(said) <= 2 * ENOUGH


def time_blocks(rank: int, store: str, blocks: Blocks) -> dict[str, dict[str, list[float]]]:
    """`wall_s`, `cpu_s` and `thread_s` of this rank by row, an entry per round, and `call_s` inside the controller's
    `step()`.

    A collective call in `RANKS` processes.

    store   path of a file that does not exist yet, for the rendezvous of the ranks
    """
    join_ranks(rank, store)
    try:
        jobs = {name: RowJob(name, blocks.width, blocks.samples) for name in blocks.rows}
        for job in jobs.values():
            job.train(blocks.warm_up)
        gc.collect()
        gc.freeze()  # otherwise the objects of five idle jobs slow every row's garbage collection
        found: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in blocks.rows} for clock in CLOCKS}
        found["call_s"] = {name: [] for name, job in jobs.items() if job.controller is not None}
        for turn in range(blocks.most):
            if turn >= blocks.rounds and settled(found["thread_s"]):
                break
            for name in balanced_order(blocks.rows, blocks.seed + turn):
                job, before_s = jobs[name], jobs[name].call_s
                for clock, spent_s in zip(CLOCKS, timed(job, blocks.steps), strict=True):
                    found[clock][name].append(spent_s)
                if name in found["call_s"]:
                    found["call_s"][name].append(job.call_s - before_s)
        for job in jobs.values():
            job.close()
        return found
    finally:
        dist.destroy_process_group()


def find_width(rank: int, store: str, step_s: float, tries: int = 5) -> int:
    """The width whose plain step takes about `step_s` seconds here; the smallest one if none is that fast.

    A collective call in `RANKS` processes, which all get rank 0's result.
    """
    join_ranks(rank, store)
    try:
        width, best = 256, (float("inf"), 256)
        for _ in range(tries):
            job = RowJob(PLAIN, width, samples=64 * BATCH * RANKS)
            job.train(3)
            steps = 10 if step_s > 0.01 else 50
            wall_s = min(timed(job, steps // 2)[0] for _ in range(2)) / (steps // 2)
            said = torch.tensor([wall_s], dtype=torch.float64)
            dist.broadcast(said, 0)
            off = float(said) / step_s
            best = min(best, (abs(off - 1.0), width))
            if best[0] < 0.05:
                break
            width = int(min(max(8 * round(width / off**0.5 / 8), 8), WIDEST))
        return best[1]
    finally:
        dist.destroy_process_group()


def join_ranks(rank: int, store: str) -> None:
    """Make the group of `RANKS` processes, with a rendezvous in the file `store`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT)
