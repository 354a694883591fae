"""DBS and LB-BSP: the paper's golden case and what a speed change does."""

from __future__ import annotations

import numpy as np

from dynamix.policies.proportional import DBS, LBBSP
from dynamix.projection import project
from dynamix.window import Bounds, Window


def test_dbs_golden_case_of_the_papers_appendix() -> None:
    assert project([13.7, 16.5, 19.6, 14.2], Bounds.of(4), total=64).tolist() == [14, 16, 20, 14]
    # The same shares out of measured times: t_i = b_i / q_i makes d_i / t_i proportional to q_i.
    window = Window.of([16] * 4, compute=16 / np.array([13.7, 16.5, 19.6, 14.2]))
    assert DBS().decide(window, Bounds.of(4)).tolist() == [14, 16, 20, 14]


def test_lb_bsp_equalises_affine_finishing_times() -> None:
    alpha, beta, policy = np.array([0.01, 0.02, 0.0]), np.array([1e-3, 2e-3, 4e-3]), LBBSP()
    sizes = np.array([200, 200, 200])
    for _ in range(30):
        sizes = policy.decide(Window.of(sizes, compute=alpha + beta * sizes), Bounds.of(3))
    times = alpha + beta * sizes
    assert sizes.sum() == 600
    assert times.max() - times.min() <= 2 * beta.max()


def test_lb_bsp_follows_a_halved_worker_at_once_and_a_jitter_slowly() -> None:
    policy, sizes = LBBSP(), np.array([100, 100])
    policy.decide(Window.of(sizes, compute=[0.1, 0.1]), Bounds.of(2))
    slight = policy.decide(Window.of(sizes, compute=[0.1, 0.11]), Bounds.of(2))
    assert 100 > slight[1] > 200 / 2.1
    halved = policy.decide(Window.of(sizes, compute=[0.1, 0.22]), Bounds.of(2))
    assert halved.sum() == 200
    assert halved[1] <= 63
