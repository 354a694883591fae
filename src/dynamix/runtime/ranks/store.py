"""The job's key-value store, in which its ranks meet, and whether it is still there.

torchrun keeps it in a process of its own. Under srun, mpirun and mp.spawn it is in rank 0's process, and ends with it.
A process that then makes another connection to it would try that for the store's timeout, half an hour.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dynamix.errors import DynamixError, WorkerLostError

CONNECT_S = 8.0  # for another connection: a host that is busy answers late, one without the store refuses at once
LINGER_S = 10.0  # how long at most a rank that fails stays for the others to read why: it may hold the store


def job_store() -> Any:
    """The key-value store through which the ranks of this job met."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def own_connection(store: Any, connect_s: float = CONNECT_S) -> Any:
    """Another connection to `store`, behind which nobody else waits; `store` itself where there is no such thing.

    Raises `OSError` if nobody listens any more: `clone()` would try on, and fill the log with that.
    """
    if not hasattr(store, "clone"):
        return store
    require_reachable(store, connect_s)
    return store.clone()


def require_reachable(store: Any, connect_s: float = CONNECT_S) -> None:
    """Raise `OSError` where nobody listens for the clients of `store` any more."""
    if (address := _address(store)) is not None:
        socket.create_connection(address, timeout=connect_s).close()


def held_here(store: Any) -> bool:
    """Whether `store`, the job's, ends with this process."""
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.get_rank() == 0 and not of_launcher and _address(store) is not None


@contextmanager
def store_is_there() -> Iterator[None]:
    """An error inside that the loss of the job's store has led to is raised as `WorkerLostError`, which says so."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        says_why = isinstance(error, DynamixError) and not isinstance(error, WorkerLostError)
        if says_why or not dist.is_initialized():
            raise
        try:
            require_reachable(store := job_store())
        except OSError:
            host, port = _address(store) or ("", 0)
            gone = f"rank 0's store ({host}, port {port}) is gone: rank 0 ended before all ranks had made a Controller"
            raise WorkerLostError(f"{gone}. Its error is in rank 0's log", (0,)) from error
        raise


def _address(store: Any) -> tuple[str, int] | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "host") and hasattr(store, "port") else None
