"""torchft: every rank is a replica group of its own, and all average parameters after `sync_every` steps each.

Its two modes: LocalSGD (parameters are averaged) and DiLoCo (an outer SGD with Nesterov momentum steps by the averaged
change). All ranks take the same number of steps between averagings: it has no other mode.
"""

from __future__ import annotations

import datetime
import importlib
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

from .job import START_TIMEOUT_S, Run, Task, as_is

TIMEOUT = datetime.timedelta(seconds=60)


def main(path: str) -> None:
    task = Task(path)
    every = int(task.settings["sync_every"])
    manager, _servers = join(task)
    task.warm_up()
    meet_once(manager)
    net = task.model()
    optimizer = task.optimizer(net.parameters())
    run = Run(task, net, meets_every=every)
    batches = forever(task)
    run.begin()
    with averaging(task, manager, net, optimizer):
        for step, (inputs, targets) in enumerate(batches, 1):
            loss = task.loss(net(inputs), targets)
            loss.backward()
            began_s = time.perf_counter()
            optimizer.step()  # on every `sync_every`-th call torchft's hook averages with the others
            if step % every == 0:
                run.met(time.perf_counter() - began_s)
            optimizer.zero_grad()
            if not run.goes_on(step * task.share * task.world_size, loss.item(), [task.share] * task.world_size):
                break
    run.finish()


def averaging(task: Task, manager: Any, net: nn.Module, optimizer: SGD) -> AbstractContextManager[object]:
    """torchft's hook on `optimizer`."""
    local_sgd, settings = importlib.import_module("torchft.local_sgd"), task.settings
    every = int(settings["sync_every"])
    if settings["outer"] is None:
        return cast(AbstractContextManager[object], local_sgd.LocalSGD(manager, net, optimizer, every))
    outer = SGD(net.parameters(), **settings["outer"])
    return cast(AbstractContextManager[object], local_sgd.DiLoCo(manager, [net], optimizer, outer, every))


def join(task: Task) -> tuple[Any, list[Any]]:
    """This rank's manager, and the objects that must live as long. Rank 0 runs the lighthouse, which tracks the ranks.

    All addresses are numeric: torchft would announce the machine's name, which hosts cannot resolve.
    """
    coordination, torchft = importlib.import_module("torchft.coordination"), importlib.import_module("torchft")
    servers = []
    if task.rank == 0:
        # A quorum needs all ranks, so no rank waits for late ones longer than necessary.
        servers.append(coordination.LighthouseServer(bind="[::]:0", min_replicas=task.world_size))
        task.announce(f"http://{task.address()}:{servers[0].address().rpartition(':')[2]}")
    lighthouse = task.announced()
    store = TCPStore(task.address(), 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=None, state_dict=None,
        min_replica_size=task.world_size, use_async_quorum=False, timeout=TIMEOUT,
        quorum_timeout=datetime.timedelta(seconds=START_TIMEOUT_S), rank=0, world_size=1,
        store_addr=task.address(), store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"rank{task.rank}", hostname=task.address(),
        init_sync=False,  # all begin with the same weights
    )  # fmt: skip
    return manager, [*servers, store]


def meet_once(manager: Any) -> None:
    """Form the first quorum, which makes the process group, before the clock starts."""
    manager.start_quorum()
    manager.allreduce(torch.zeros(1)).wait()
    if not manager.should_commit():
        sys.exit("torchft's first meeting failed")


def forever(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank takes its part of every pass, as in torchft's examples."""
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        task.data, num_replicas=task.world_size, rank=task.rank, seed=task.seed
    )
    loader = DataLoader(task.data, batch_size=task.share, sampler=sampler, collate_fn=as_is)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


if __name__ == "__main__":
    main(sys.argv[1])
