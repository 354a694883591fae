"""The job's key-value store, which all its ranks use, and checks that it still exists.

torchrun keeps it in a separate process. Under srun, mpirun and mp.spawn it is in rank 0's process, and ends with it.
Another process that opens a connection then would retry for the store's timeout, half an hour.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dynamix.errors import DynamixError, WorkerLostError

CONNECT_S = 8.0  # for a new connection: a busy host answers late; one without the store refuses at once
LINGER_S = 10.0  # longest that a failing rank stays so that others can read why: it may hold the store


def job_store() -> Any:
    """The key-value store of this job's default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def own_connection(store: Any, connect_s: float = CONNECT_S) -> Any:
    """A separate connection to `store`, which no other thread uses; `store` itself if it cannot be cloned.

    Raises `OSError` if no process listens any more: `clone()` would retry, and fill the log.
    """
    if not hasattr(store, "clone"):
        return store
    require_reachable(store, connect_s)
    return store.clone()


def require_reachable(store: Any, connect_s: float = CONNECT_S) -> None:
    """Raise `OSError` if no process listens for the clients of `store` any more."""
    if (address := _address(store)) is not None:
        socket.create_connection(address, timeout=connect_s).close()


def held_here(store: Any) -> bool:
    """Whether the job's `store` ends with this process."""
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.get_rank() == 0 and not of_launcher and _address(store) is not None


@contextmanager
def store_is_there() -> Iterator[None]:
    """If the loss of the job's store caused an error inside, raise it as `WorkerLostError`, which says so."""
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
