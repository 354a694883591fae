"""Policies in simulated clusters, for suites."""

from __future__ import annotations

from collections.abc import Callable

from dynamix.policies.protocol import Policy, boundary
from dynamix_lab.simulator import ClusterEnv, Clusters

Factory = Callable[[ClusterEnv], Policy]
EPOCH_WINDOWS = 20  # windows in an epoch, for policies that decide per epoch


def world_of(
    make: Factory, clusters: Clusters, *, seed: int, windows: int, interval: int, delay: int
) -> tuple[Policy, ClusterEnv, int]:
    """A policy, its environment, and the number of windows in which it decides. A policy that decides per epoch gets
    windows of that length, and its decisions apply without delay."""
    env = ClusterEnv(clusters, seed=seed, interval=interval, delay=delay)
    policy = make(env)
    if boundary(policy) != "epoch":
        return policy, env, windows
    env = ClusterEnv(clusters, seed=seed, interval=EPOCH_WINDOWS * interval, delay=0)
    return policy, env, -(-windows // EPOCH_WINDOWS)
