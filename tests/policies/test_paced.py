"""Windows are short where workers change their speed, and long where nothing does."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from dynamix.policies import make_policy
from dynamix.policies.guard import Guard
from dynamix.policies.paced import FIRST, LEAST, MOST, Paced
from dynamix.policies.static import Static
from dynamix.policies.wrappers import load_policy
from dynamix.window import Window
from dynamix_lab.simulator import ClusterEnv, rollout, sample_family


def _windows(policy: Paced, env: ClusterEnv, count: int) -> list[Window]:
    return list(islice(rollout(policy, env), count))


def test_windows_are_short_where_workers_change_and_long_where_nothing_does() -> None:
    clusters = sample_family("affine-quiet", 12, 4, seed=3)
    changing = np.arange(12) < 6
    clusters = replace(
        clusters,
        neighbour_period_s=np.where(changing, 40 * clusters.costs.seconds(np.full((12, 4), 32.0)).max(-1), 60.0),
        neighbour_factor=np.where(changing, 3.0, 1.0),
    )
    windows = _windows(Paced(make_policy("goodput")), ClusterEnv(clusters, seed=1, interval=FIRST), 80)
    lengths = np.array([window.steps for window in windows])
    assert (lengths[0] == FIRST).all()
    assert (np.diff(lengths[:3], axis=0) <= 1).all()  # a job begins by looking often
    assert LEAST <= lengths.min() <= lengths.max() <= MOST
    late = lengths[40:].mean(0)
    assert late[changing].max() < 5 < late[~changing].min()


def test_a_policy_without_a_job_model_has_a_pace_too() -> None:
    env = ClusterEnv(sample_family("affine-quiet", 2, 4, seed=3), seed=1, interval=FIRST)
    assert _windows(Paced(Static()), env, 30)[-1].steps.min() > 5


def test_it_goes_on_from_its_state_as_if_nothing_had_been() -> None:
    clusters = sample_family("affine-slowdowns", 3, 4, seed=3)
    for make in (lambda: make_policy("goodput"), lambda: Guard(make_policy("lb_bsp"))):
        policy, env = Paced(make()), ClusterEnv(clusters, seed=1, interval=FIRST)
        window = _windows(policy, env, 20)[-1]
        again = Paced(make())
        load_policy(again, policy.state_dict())
        sizes, repeated = (one.decide(window, env.bounds) for one in (policy, again))
        assert (sizes == repeated).all()
        assert (again.window_length == policy.window_length).all()


def test_states_go_to_policies_with_windows_of_one_length_and_back() -> None:
    env = ClusterEnv(sample_family("affine-slowdowns", 1, 4, seed=3), seed=1, interval=FIRST)
    paced = Paced(Guard(make_policy("goodput")))
    window = _windows(paced, env, 12)[-1]
    guarded, plain, anew = Guard(make_policy("goodput")), make_policy("goodput"), Paced(make_policy("goodput"))
    load_policy(guarded, paced.state_dict())
    load_policy(plain, paced.state_dict())
    load_policy(anew, plain.state_dict())
    assert anew.window_length == FIRST
    sizes = [policy.decide(window, env.bounds).tolist() for policy in (plain, anew)]
    assert sizes[0] == sizes[1]
