"""Hivemind: each rank runs at its own speed. A global step follows once all together have reached the target batch.

Its two modes: gradients averaged by samples (the default, equivalent to synchronous training), or local updates (each
rank steps by itself, and parameters are averaged after a number of samples).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .job import Run, Task, as_is

START_ATTEMPTS = 5


def main(path: str) -> None:
    task = Task(path)
    hivemind = importlib.import_module("hivemind")
    # When the process is killed, its daemon's sockets would stay in /tmp.
    importlib.import_module("hivemind.p2p.p2p_daemon").P2P._UNIX_SOCKET_PREFIX = f"/unix{task.config['snapshots']}/"
    dht = join(hivemind, task)
    net = task.model()
    optimizer = make_optimizer(hivemind, task, dht, net)
    task.warm_up()
    run = Run(task, net, in_step=False)
    batches = forever(task)
    run.begin()
    optimizer.tracker.performance_ema.reset_timer()  # time before the clock starts does not measure this rank's speed
    for inputs, targets in batches:
        before = optimizer.local_epoch
        loss = task.loss(net(inputs), targets)
        loss.backward()
        began_s = time.perf_counter()
        optimizer.step()
        if optimizer.local_epoch != before:
            run.met(time.perf_counter() - began_s)
        optimizer.zero_grad()
        stepped = bool(task.settings["local_updates"]) or optimizer.local_epoch != before
        if not run.goes_on(run.board.add(len(targets)), loss.item(), parts(task, run), stepped=stepped):
            break
    run.finish()


def make_optimizer(hivemind: Any, task: Task, dht: Any, net: nn.Module) -> Any:
    """The optimizer. docs/design/peers.md explains its settings."""
    settings = task.settings
    averager = {"target_group_size": task.world_size, "request_timeout": settings["request_timeout_s"]}
    # Its documentation says that averager_opts apply to both averagers; version 1.1.12 passes them only to that of the
    # state.
    gradients = (
        None
        if settings["local_updates"]
        else functools.partial(importlib.import_module("hivemind.optim.grad_averager").GradientAverager, **averager)
    )
    return hivemind.Optimizer(
        dht=dht,
        run_id=f"{task.name}-{task.seed}".replace(".", "_"),  # dots are not allowed
        batch_size_per_step=settings["batch_size_per_step"],
        target_batch_size=settings["target_batch_size"],
        params=list(net.parameters()),
        optimizer=task.optimizer,
        use_local_updates=settings["local_updates"],
        matchmaking_time=settings["matchmaking_s"],
        averaging_timeout=settings["averaging_timeout_s"],
        average_state_every=settings["average_state_every"],
        averager_opts=averager,
        grad_averager_factory=gradients,
        tracker_opts={
            "min_refresh_period": settings["refresh_s"], "default_refresh_period": settings["refresh_s"],
            "max_refresh_period": 1.0,
        },
        client_mode=dht.client_mode, verbose=task.rank == 0,
    )  # fmt: skip


def join(hivemind: Any, task: Task) -> Any:
    """Join the distributed hash table on the emulated hosts' addresses; the others first contact rank 0.

    They are clients, so rank 0 leads all rounds. Otherwise four averagers that begin together ask one another in
    circles until a timeout, and most rounds have only two or three of them.
    """
    common = {
        "host_maddrs": [f"/ip4/{task.address()}/tcp/0"], "start": True,
        "auto_nat": False, "nat_port_map": False, "use_relay": False,
    }  # fmt: skip
    if task.rank == 0:
        dht = hivemind.DHT(**common)
        task.announce("\n".join(str(address) for address in dht.get_visible_maddrs()))
        return dht
    peers = task.announced().split()
    for _ in range(START_ATTEMPTS - 1):
        # A machine busy with starting four ranks may not answer within Hivemind's 3 s.
        with contextlib.suppress(RuntimeError):
            return hivemind.DHT(initial_peers=peers, client_mode=True, **common)
    return hivemind.DHT(initial_peers=peers, client_mode=True, **common)


def forever(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank shuffles the whole set by itself, as in Hivemind's examples: it has no sampler."""
    generator = torch.Generator().manual_seed(1000 * task.seed + task.rank)
    loader = DataLoader(
        task.data, batch_size=task.settings["batch_size_per_step"], shuffle=True, drop_last=True, collate_fn=as_is,
        generator=generator,
    )  # fmt: skip
    while True:
        yield from loader


def parts(task: Task, run: Run) -> list[int]:
    """Each rank's contributions so far, scaled to one global batch."""
    counts = [int(count) for count in run.board.samples]
    return [round(task.total * count / max(1, sum(counts))) for count in counts]


if __name__ == "__main__":
    main(sys.argv[1])
