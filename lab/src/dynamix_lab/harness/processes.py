"""Independent pieces of a bench beside each other, in processes of one thread each."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from dynamix.errors import WorkerLostError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def in_processes(
    function: Callable[..., T], arguments: Mapping[K, tuple[Any, ...]], processes: int
) -> Iterator[tuple[K, T]]:
    """`function(*arguments[key])` with its key, as they end. An error or an interrupt ends all of them at once.

    function   importable by name; so must be the script that asks, behind `if __name__ == "__main__"`
    Raises what a piece raises, and `WorkerLostError` when a process was killed.
    """
    before = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max(1, min(processes, len(arguments))), mp_context=spawn, initializer=_alone)
    try:
        running = {pool.submit(function, *given): key for key, given in arguments.items()}
        # A submission starts a process after it woke who watches them (CPython 3.11): one more, or the last is not
        # watched.
        pool.submit(_alone)
        for future in as_completed(running):
            yield running[future], future.result()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise WorkerLostError("a process of this bench was killed, perhaps for memory: use fewer") from error
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _alone() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
