"""Identifies workers by host, so that measured shares survive a change of rank numbers.

A restarted job numbers its ranks anew, and after a change of members it has more or fewer ranks.
"""

import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dynamix.window import Floats, Ints

HOST = "DYNAMIX_HOST"
"""Environment variable: the name under which a worker's speed is stored, if host names change or are all alike."""


MOST_AWAY = 1024


def own_host() -> str:
    """The name of this worker's host."""
    return os.environ.get(HOST) or socket.gethostname()


def workers_of(hosts: Sequence[str]) -> list[str]:
    """A name for each worker: its host, and its number among the host's workers.

    >>> workers_of(["b", "a", "a"])
    ['b/0', 'a/0', 'a/1']
    """
    numbers = defaultdict[str, Iterator[int]](itertools.count)
    return [f"{host}/{next(numbers[host])}" for host in hosts]


def remembered(known: Mapping[str, float], workers: Sequence[str], sizes: Ints) -> dict[str, float]:
    """Relative shares by worker, of those here now and of earlier ones, on one scale.

    sizes   (W,) of the workers here now

    Of absent workers the newest `MOST_AWAY` are kept.

    >>> remembered({"a/0": 1.0, "b/0": 3.0}, ["a/0", "c/0"], np.array([20, 20]))
    {'b/0': 60.0, 'a/0': 20.0, 'c/0': 20.0}
    """
    now = {worker: float(size) for worker, size in zip(workers, sizes, strict=True)}
    both = [worker for worker in workers if known.get(worker) and now[worker]]
    scale = sum(now[worker] for worker in both) / sum(known[worker] for worker in both) if both else 1.0
    away = [(worker, scale * share) for worker, share in known.items() if worker not in now]
    return dict(away[-MOST_AWAY:]) | now


def shares_of(known: Mapping[str, float], workers: Sequence[str]) -> Floats:
    """Relative shares (W,) to start with: known ones, and for new workers the mean of those.

    >>> shares_of({"a/0": 20.0, "b/0": 60.0}, ["b/0", "c/0", "a/0"]).tolist()
    [60.0, 40.0, 20.0]
    """
    shares = np.array([known.get(worker, np.nan) for worker in workers])
    if np.isnan(shares).all():
        return np.ones(len(workers))
    return np.where(np.isnan(shares), np.nanmean(shares), shares)
