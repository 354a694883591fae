"""The goodput rule in the world it assumes: affine costs, little jitter, slowdowns; times against the references there.

Two references know the true costs, the exchange and the noise scale. `LaggedReference` knows the slowdowns of the very
moment a window closes, also of the step that no window has measured yet; "one window late" knows the true means over
the window that closed, all that a policy could be told.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dynamix.policies.goodput import Goodput
from dynamix.policies.proportional import LBBSP
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window
from dynamix_lab.baselines.cannikin import Cannikin
from dynamix_lab.simulator import Clusters, LaggedReference, sample_clusters
from dynamix_lab.training.evaluation import times_to_progress

RULES = {"goodput": Goodput, "cannikin": Cannikin, "lb_bsp": LBBSP}


class OneWindowLate(LaggedReference):
    """The best allocation for the true mean costs of the window that closed."""

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        factor = window.compute / self.env.costs.seconds(window.batch_size.astype(np.float64))
        return project(self._best(factor, self.env.exchange()), bounds, current=window.batch_size)


def affine_world(count: int, workers: int, seed: int, *, slowdowns: bool) -> Clusters:
    """`sample_clusters` without stalls, with 1 % jitter and nearly exact figures; with its slowdowns or without any."""
    clusters = sample_clusters(count, workers, seed)
    exact = {"jitter_sd": np.full(clusters.shape, 0.01), "stall": np.zeros(count), "noise_error": np.full(count, 0.02)}
    exact |= {"missing_noise": np.zeros(count, dtype=bool)}
    still = {"slow_off_s": np.full(clusters.shape, 1e12), "neighbour_factor": np.ones(count)}
    return dataclasses.replace(clusters, **exact, **({} if slowdowns else still))


def _ratio(times: dict[str, np.ndarray], reference: str, policy: str) -> float:
    return float(np.exp(np.log(times[reference] / times[policy]).mean()))


def test_with_slowdowns_it_is_as_fast_as_knowing_the_last_window_exactly() -> None:
    rules = {"late": OneWindowLate, **{name: lambda _, rule=rule: rule() for name, rule in RULES.items()}}
    clusters = affine_world(32, 8, 6001, slowdowns=True)
    times = times_to_progress(rules, clusters, seed=6001, windows=80, interval=5, delay=1)
    assert _ratio(times, "late", "goodput") > 0.995
    assert _ratio(times, "cannikin", "goodput") > 1.05
    assert _ratio(times, "lb_bsp", "goodput") > 1.05


def test_without_slowdowns_it_comes_within_one_per_cent_of_the_lagged_reference_counting_what_it_has_to_learn() -> None:
    rules, clusters = (
        {"lagged": LaggedReference, "goodput": lambda _: Goodput()},
        affine_world(32, 8, 6002, slowdowns=False),
    )
    times = times_to_progress(rules, clusters, seed=6002, windows=100, interval=5, delay=1)
    assert _ratio(times, "lagged", "goodput") > 0.99
