"""Which worker is on which host: what is known of a worker's speed goes with the host, not with the rank's number.

A job that is started again deals ranks anew, and after a change of members there are more or fewer of them.
"""

import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dynamix.window import Floats, Ints

HOST = "DYNAMIX_HOST"
"""Environment variable: the name that a worker's speed is remembered by, where hosts' names change or are all alike."""


MOST_AWAY = 1024


def own_host() -> str:
    """This worker's host."""
    return os.environ.get(HOST) or socket.gethostname()


def workers_of(hosts: Sequence[str]) -> list[str]:
    """A name for each worker: its host, and which of the host's workers it is.

    >>> workers_of(["b", "a", "a"])
    ['b/0', 'a/0', 'a/1']
    """
    numbers = defaultdict[str, Iterator[int]](itertools.count)
    return [f"{host}/{next(numbers[host])}" for host in hosts]


def remembered(known: Mapping[str, float], workers: Sequence[str], sizes: Ints) -> dict[str, float]:
    """Shares by worker, of those that are here and of those that were: relative, on one scale.

    sizes   (W,) of the workers that are here now

    The newest `MOST_AWAY` of those that are away are kept.

    >>> remembered({"a/0": 1.0, "b/0": 3.0}, ["a/0", "c/0"], np.array([20, 20]))
    {'b/0': 60.0, 'a/0': 20.0, 'c/0': 20.0}
    """
    now = {worker: float(size) for worker, size in zip(workers, sizes, strict=True)}
    both = [worker for worker in workers if known.get(worker) and now[worker]]
    scale = sum(now[worker] for worker in both) / sum(known[worker] for worker in both) if both else 1.0
    away = [(worker, scale * share) for worker, share in known.items() if worker not in now]
    return dict(away[-MOST_AWAY:]) | now


def shares_of(known: Mapping[str, float], workers: Sequence[str]) -> Floats:
    """Relative shares (W,) to begin with: those that are known, and their mean for workers that are new.

    >>> shares_of({"a/0": 20.0, "b/0": 60.0}, ["b/0", "c/0", "a/0"]).tolist()
    [60.0, 40.0, 20.0]
    """
    shares = np.array([known.get(worker, np.nan) for worker in workers])
    if np.isnan(shares).all():
        return np.ones(len(workers))
    return np.where(np.isnan(shares), np.nanmean(shares), shares)
