"""Policies in simulated clusters as suites play them."""

from __future__ import annotations

from collections.abc import Callable

from dynamix.policies.protocol import Policy, boundary
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window
from dynamix_lab.simulator import ClusterEnv, Clusters

Factory = Callable[[ClusterEnv], Policy]
EPOCH_WINDOWS = 20  # windows in an epoch, for policies that decide per epoch


def world_of(
    make: Factory, clusters: Clusters, *, seed: int, windows: int, interval: int, delay: int
) -> tuple[Policy, ClusterEnv, int]:
    """A policy, its environment, and in how many windows it decides there: one that decides per epoch gets windows that
    long, and its answers wait for nothing."""
    env = ClusterEnv(clusters, seed=seed, interval=interval, delay=delay)
    policy = make(env)
    if boundary(policy) != "epoch":
        return policy, env, windows
    env = ClusterEnv(clusters, seed=seed, interval=EPOCH_WINDOWS * interval, delay=0)
    return policy, env, -(-windows // EPOCH_WINDOWS)


class Projected:
    """`policy` whose answers are held to the bounds, as a live job holds them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return project(self.policy.decide(window, bounds), bounds, current=window.batch_size)
