"""Runs a function on W real gloo ranks and brings back what each returned."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_CONTEXT = mp.get_context("forkserver")
# What every rank would import for itself, a second or two each: the optimizers alone import torch._dynamo.
_PRELOADED = "pytest numpy.random torch.distributed torch._dynamo torch.nn.parallel torch.utils.data tests.ranks"
_CONTEXT.set_forkserver_preload([*_PRELOADED.split(), "dynamix.runtime.controller", "dynamix.policies.learned.policy"])


class RankFailed(AssertionError):
    """A rank raised, died or hung; carries every rank's outcome."""

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        super().__init__("\n".join(f"rank {i}: {o}" for i, o in enumerate(outcomes) if not isinstance(o, Ok)))


class Ok:
    def __init__(self, value: Any) -> None:
        self.value = value


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    group_timeout_s: float = 30,
    expect_failure: bool = False,
) -> list[Any]:
    """`function(rank, *args)` on each rank; the values, or with `expect_failure` the raw outcomes (Ok or traceback)."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            _CONTEXT.Process(target=_rank, args=(function, rank, world_size, folder, group_timeout_s, args))
            for rank in range(world_size)
        ]
        try:
            for job in jobs:
                job.start()
            for job in jobs:
                job.join(timeout_s)
            outcomes = [_outcome(Path(folder) / f"out{rank}", job) for rank, job in enumerate(jobs)]
        finally:
            for job in jobs:
                if job.is_alive():
                    job.kill()
                    job.join(5)
    if expect_failure:
        return outcomes
    if not all(isinstance(o, Ok) for o in outcomes):
        raise RankFailed(outcomes)
    return [o.value for o in outcomes]


def _outcome(path: Path, job: Any) -> Any:
    if job.is_alive():
        return "hung"
    if not path.exists():
        return f"died with exit code {job.exitcode}"
    return pickle.loads(path.read_bytes())


def _rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, timeout_s: float, args: Any) -> None:
    torch.set_num_threads(1)
    mp.set_start_method("fork", force=True)  # for loaders' workers, the default of Linux: not a server for each rank
    np.random.seed()  # preloaded, all ranks would begin alike
    out = Path(folder) / f"out{rank}"
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        outcome: Any = Ok(function(rank, *args))
    except BaseException:
        outcome = traceback.format_exc()
    temporary = out.with_suffix(".part")
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(out)
    os._exit(0)  # a peer's death can leave gloo threads that would keep the process
