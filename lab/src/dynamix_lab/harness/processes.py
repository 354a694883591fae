"""Runs independent parts of a bench in parallel, in processes of one thread each."""

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
    """Yield `function(*arguments[key])` with its key, as each ends. An error or an interrupt ends all of them at once.

    function   importable by name; the calling script needs `if __name__ == "__main__"`
    Raises what a call raises, and `WorkerLostError` if a process was killed.
    """
    before = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max(1, min(processes, len(arguments))), mp_context=spawn, initializer=_alone)
    try:
        running = {pool.submit(function, *given): key for key, given in arguments.items()}
        # CPython 3.11 starts a process after waking the thread that watches processes, so the last process would not be
        # watched. One more submission wakes the thread again.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
