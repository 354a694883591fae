"""The one loop that follows a policy on an environment."""

from itertools import islice, pairwise

import numpy as np
import pytest

from dynamix.policies.proportional import LBBSP
from dynamix.window import Bounds, Ints, Window
from dynamix_lab.simulator import ClusterEnv, rollout, rollout_path, sample_family


def world() -> ClusterEnv:
    return ClusterEnv(sample_family("affine-slowdowns", 3, 4, seed=2), seed=2)


class Counting(LBBSP):
    """LB-BSP, which counts how often it was asked."""

    asked = 0

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        self.asked += 1
        return super().decide(window, bounds)


def test_the_first_window_is_at_equal_shares_and_each_other_under_the_answer_to_the_one_before() -> None:
    env, twin = world(), LBBSP()
    windows = list(rollout(LBBSP(), env, 5))
    assert len(windows) == 6
    assert (windows[0].batch_size == windows[0].batch_size[:, :1]).all()
    for before, after in pairwise(windows):
        np.testing.assert_array_equal(after.batch_size, twin.decide(before, env.bounds))


def test_a_decision_is_made_when_its_window_is_asked_for_and_the_environment_is_seen_as_it_is_then() -> None:
    env, policy = world(), Counting()
    followed = rollout(policy, env)
    clocks = []
    for _ in islice(followed, 4):
        clocks.append(env.clock_s)
    assert policy.asked == 3
    assert (np.diff(clocks, axis=0) > 0).all()


@pytest.mark.parametrize("windows", [0, 1, 7])
def test_a_path_has_a_point_before_the_first_decision_and_one_after_each(windows: int) -> None:
    env = world()
    path = rollout_path(LBBSP(), env, windows)
    assert path.shape == (windows + 1, 2, 3)
    np.testing.assert_array_equal(path[-1], [env.clock_s, env.progress])
    np.testing.assert_array_equal(path, rollout_path(LBBSP(), env, windows))  # every rollout starts over
