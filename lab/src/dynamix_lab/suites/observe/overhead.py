"""Time of the training thread in blocks of steps, with and without observing, in turn in one pair of processes."""

from __future__ import annotations

import contextlib
import gc
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynamix.observe import hooks
from dynamix_lab.suites.overhead.ranks import PLAIN, RowJob, join_ranks, timed

WARM_UP = 30


class Switch:
    """Removes what observing has changed in torch, and restores it."""

    def __init__(self, folder: Path) -> None:
        self.places = [
            (torch.nn.parallel.DistributedDataParallel, "forward"),
            (torch.nn.parallel.DistributedDataParallel, "_sync_buffers"),
            (importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter, "__next__"),
        ]
        self.registered: Any = importlib.import_module("torch.optim.optimizer")
        self.hooks = [self.registered._global_optimizer_pre_hooks, self.registered._global_optimizer_post_hooks]
        self.plain = [getattr(owner, name) for owner, name in self.places]
        self.watch = hooks.start(torch, str(folder))
        self.observed = [getattr(owner, name) for owner, name in self.places]
        self.kept = [dict(registered) for registered in self.hooks]
        self.set(False)

    def set(self, on: bool) -> None:
        """Switch observing on or off."""
        for (owner, name), value in zip(self.places, self.observed if on else self.plain, strict=True):
            setattr(owner, name, value)
        for registered, kept in zip(self.hooks, self.kept, strict=True):
            registered.clear()
            registered.update(kept if on else {})


def time_observed(rank: int, store: str, width: int, blocks: int, steps: int) -> dict[str, list[float]]:
    """Processor seconds of this rank's training thread by block, `off` and `on`; the order depends on a pair's number.

    A collective call in two processes.
    """
    join_ranks(rank, store)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = RowJob(PLAIN, width, samples=(2 * WARM_UP + 2 * blocks * steps + 10) * 512)
        switch = Switch(folder)
        stack.callback(switch.watch.stop)
        for on in (False, True):
            switch.set(on)
            job.train(WARM_UP)
        gc.collect()
        gc.freeze()
        found: dict[str, list[float]] = {"off": [], "on": []}
        for turn in range(blocks):
            for on in _order(turn):
                switch.set(on)
                found["on" if on else "off"].append(timed(job, steps, rest_s=0.0)[2])
        return found


def _order(turn: int) -> Iterator[bool]:
    """Off first, on first, on first, off first, so that a steady drift affects both equally."""
    yield from ((False, True) if turn % 4 in (0, 3) else (True, False))
