"""Runs a function, or a script, on W real gloo ranks and brings back what each returned or printed."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing as mp
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.processes import ONE_HOST

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])
_ADAPTED = forkserver.ForkServer()  # for ranks under a framework, each of which takes seconds to import, too
_ADAPTERS = [f"dynamix.integrations.{name}" for name in ("accelerate", "fabric", "lightning", "transformers")]
_ADAPTED.set_forkserver_preload([*_ADAPTERS, "tests.preloaded"])  # which freezes all of it

_PORTS = itertools.count()

Kinds = type[Exception] | tuple[type[Exception], ...]


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
    frameworks: bool = False,
) -> list[Any]:
    """`function(rank, *args)` on each rank; the values, or with `expect_failure` the raw outcomes (Ok or traceback).

    frameworks   the ranks begin with those imported that have adapters
    """
    server = mock.patch.object(forkserver, "connect_to_new_process", _ADAPTED.connect_to_new_process)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            _CONTEXT.Process(target=_rank, args=(function, rank, world_size, folder, group_timeout_s, args))
            for rank in range(world_size)
        ]
        try:
            with server if frameworks else contextlib.nullcontext():
                for job in jobs:
                    job.start()
            for job in jobs:
                job.join(timeout_s)
            hung = _end(jobs)
            outcomes = [_outcome(Path(folder) / f"out{rank}", job, job in hung) for rank, job in enumerate(jobs)]
        finally:
            _end(jobs)
    if expect_failure:
        return outcomes
    if not all(isinstance(o, Ok) for o in outcomes):
        raise RankFailed(outcomes)
    return [o.value for o in outcomes]


def run_cases(function: Callable[[Any], Any], world_size: int, cases: Iterable[Any], **options: Any) -> list[list[Any]]:
    """Of each case what `function(case)` returns on each rank; all of them in one launch."""
    by_rank = run_ranks(_each, world_size, function, list(cases), **options)
    return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def _each(rank: int, function: Callable[[Any], Any], cases: list[Any]) -> list[Any]:
    return [function(case) for case in cases]


def _outcome(path: Path, job: Any, hung: bool) -> Any:
    if path.exists():
        return pickle.loads(path.read_bytes())
    stacks = path.with_suffix(".stacks")
    said = "hung" if hung else f"died with exit code {job.exitcode}"
    return f"{said}\n{stacks.read_text() if stacks.exists() else 'before it began'}".strip()


def _end(jobs: Sequence[Any]) -> list[Any]:
    """End the processes that still run, first so that each writes where its threads are. Returns these."""
    hung = [job for job in jobs if job.is_alive()]
    for signum in (signal.SIGABRT, signal.SIGKILL):
        for job in hung:
            if job.is_alive():
                os.kill(job.pid, signum)
        for job in hung:
            job.join(5)
    return hung


def _rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, timeout_s: float, args: Any) -> None:
    torch.set_num_threads(1)
    mp.set_start_method("fork", force=True)  # for loaders' workers, the default of Linux: not a server for each rank
    np.random.seed()  # preloaded, all ranks would begin alike
    out = Path(folder) / f"out{rank}"
    faulthandler.enable(out.with_suffix(".stacks").open("w"))
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


def refusal(kind: Kinds, call: Callable[..., Any], *args: Any, **known: Any) -> str:
    """What a call is refused with, "accepted" if it is not."""
    try:
        call(*args, **known)
    except kind as error:
        return str(error)
    return "accepted"


def run_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int | None = None,
    folder: Path | None = None,
    timeout_s: float = 100,
) -> str:
    """What a script prints in a process of its own, or on ranks as torchrun would start them; it must end with 0.

    folder   where it runs; None: here

    The processes begin with torch imported, which takes most of the time of a short script.
    """
    with tempfile.TemporaryDirectory() as logged:
        environments = [{}] if ranks is None else launched(ranks)
        logs = [Path(logged, str(rank)) for rank in range(len(environments))]
        each = zip(environments, logs, strict=True)
        jobs = [start_script(script, arguments, log, env=env, folder=folder) for env, log in each]
        try:
            for job in jobs:
                job.join(timeout_s)
            hung = _end(jobs)
            said = "".join(log.read_text() if log.exists() else "" for log in logs)
            assert [job.exitcode for job in jobs] == [0] * len(jobs), f"{len(hung)} hung: {said[-9000:]}"
            return said
        finally:
            _end(jobs)


def start_script(
    script: Path, arguments: Sequence[str], log: Path, *, env: dict[str, str], folder: Path | None = None
) -> Any:
    """The same process of `multiprocessing`, which appends to a file what it prints."""
    given = (str(script), list(arguments), env, str(log), folder or Path.cwd())
    job = _CONTEXT.Process(target=_script, args=given)
    job.start()
    return job


def free_port() -> int:
    """A port on which nobody listens, and which no one else takes before it is used.

    The system's own choice, port 0, comes from the range of outgoing connections, so another test may get it meanwhile.
    """
    while True:
        port = 20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) + next(_PORTS) % 500
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def launched(ranks: int) -> list[dict[str, str]]:
    """The environment that torchrun gives each rank of this machine."""
    port = free_port()
    of_all = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "MASTER_PORT": port}
    of_all |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", **ONE_HOST}
    each = ({**of_all, "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank} for rank in range(ranks))
    return [{name: str(value) for name, value in known.items()} for known in each]


def _script(script: str, arguments: list[str], environment: dict[str, str], log: str, folder: Path) -> None:
    os.chdir(folder)
    os.environ |= {**ONE_HOST, **environment}
    torch.set_num_threads(1)
    mp.set_start_method("fork", force=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable(out)
    sys.argv, code = [script, *arguments], 0
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
