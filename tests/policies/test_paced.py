"""Windows are short where workers change their speed, and long where nothing does or decisions are dear."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np

from dynamix.policies import make_policy
from dynamix.policies.guard import Guard
from dynamix.policies.paced import FIRST, LEAST, MOST, Paced
from dynamix.policies.static import Static
from dynamix.policies.wrappers import load_policy
from dynamix.window import Ints, Window
from dynamix_lab.simulator import ClusterEnv, Clusters, rollout, sample_family


def clock(decision_s: float = 0.0) -> Callable[[], float]:
    """By which every decision takes so long: it is read before and after."""
    return functools.partial(next, itertools.count(0.0, decision_s))


def _windows(policy: Paced, env: ClusterEnv, count: int) -> list[Window]:
    return list(islice(rollout(policy, env), count))


def _lengths(policy: Paced, clusters: Clusters, count: int = 80) -> Ints:
    return np.array([window.steps for window in _windows(policy, ClusterEnv(clusters, seed=1, interval=FIRST), count)])


def _with_neighbours(changing: np.ndarray) -> Clusters:
    """Quiet clusters, through those of which that are `changing` a neighbour moves every 40 steps."""
    clusters = sample_family("affine-quiet", len(changing), 4, seed=3)
    step_s = clusters.costs.seconds(np.full(clusters.shape, 32.0)).max(-1)
    period_s, factor = np.where(changing, 40 * step_s, 60.0), np.where(changing, 3.0, 1.0)
    return replace(clusters, neighbour_period_s=period_s, neighbour_factor=factor)


def test_windows_are_short_where_workers_change_and_long_where_nothing_does() -> None:
    changing = np.arange(12) < 6
    lengths = _lengths(Paced(make_policy("goodput"), clock()), _with_neighbours(changing))
    assert (lengths[0] == FIRST).all()
    assert LEAST <= lengths.min() <= lengths.max() <= MOST
    late = lengths[40:].mean(0)
    assert late[changing].max() < 5 < late[~changing].min()


def test_windows_are_long_where_deciding_takes_long() -> None:
    clusters = _with_neighbours(np.ones(4, dtype=bool))
    step_s = float(clusters.costs.seconds(np.full(clusters.shape, 32.0)).max(-1).mean())
    cheap, dear = (_lengths(Paced(make_policy("goodput"), clock(s)), clusters)[40:].mean() for s in (0.0, step_s))
    assert dear > 2 * cheap


def test_a_policy_without_a_job_model_has_a_pace_too() -> None:
    assert _lengths(Paced(Static(), clock()), sample_family("affine-quiet", 2, 4, seed=3), 30)[-1].min() > 5


def test_it_goes_on_from_its_state_as_if_nothing_had_been() -> None:
    clusters = sample_family("affine-slowdowns", 3, 4, seed=3)
    for make in (lambda: make_policy("goodput"), lambda: Guard(make_policy("lb_bsp"))):
        policy, env = Paced(make(), clock()), ClusterEnv(clusters, seed=1, interval=FIRST)
        window = _windows(policy, env, 20)[-1]
        again = Paced(make(), clock())
        load_policy(again, policy.state_dict())
        sizes, repeated = (one.decide(window, env.bounds) for one in (policy, again))
        assert (sizes == repeated).all()
        assert (again.window_length == policy.window_length).all()


def test_states_go_to_policies_with_windows_of_one_length_and_back() -> None:
    env = ClusterEnv(sample_family("affine-slowdowns", 1, 4, seed=3), seed=1, interval=FIRST)
    paced = Paced(Guard(make_policy("goodput")), clock())
    window = _windows(paced, env, 12)[-1]
    guarded, plain, anew = Guard(make_policy("goodput")), make_policy("goodput"), Paced(make_policy("goodput"), clock())
    load_policy(guarded, paced.state_dict())
    load_policy(plain, paced.state_dict())
    load_policy(anew, plain.state_dict())
    assert anew.window_length == FIRST
    sizes = [policy.decide(window, env.bounds).tolist() for policy in (plain, anew)]
    assert sizes[0] == sizes[1]
