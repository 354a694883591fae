"""Follow a policy on an environment: the one loop that asks and applies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from dynamix.simulator.env import ClusterEnv
from dynamix.window import Bounds, Floats, Ints, Window


class AnswersWindows(Protocol):
    """What a rollout asks of a policy: sizes (C, W) for a window of C clusters."""

    def decide(self, window: Window, bounds: Bounds) -> Ints: ...


def rollout(policy: AnswersWindows, env: ClusterEnv, windows: int | None = None) -> Iterator[Window]:
    """Reset `env` and let `policy` decide `windows` times, or (None) for ever: yields the first window and those after.

    A decision is made when its window is asked for, so between two of them the caller sees `env` as it is then. The
    answer is applied as it is: policies keep the bounds themselves.

    >>> from dynamix.policies.proportional import LBBSP
    >>> from dynamix.simulator import sample_clusters
    >>> env = ClusterEnv(sample_clusters(3, 4, seed=0), seed=1)
    >>> [window.batch_size.shape for window in rollout(LBBSP(), env, windows=2)]
    [(3, 4), (3, 4), (3, 4)]
    """
    window = env.reset()
    yield window
    while windows is None or windows > 0:
        window = env.step(policy.decide(window, env.bounds))
        yield window
        windows = None if windows is None else windows - 1


def rollout_path(policy: AnswersWindows, env: ClusterEnv, windows: int) -> Floats:
    """Seconds and progress, (windows + 1, 2, C), before the first decision and after each."""
    return np.array([(env.clock_s, env.progress) for _ in rollout(policy, env, windows)])
