"""The shipped figures, and the disturbances and curves made of them."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix_lab.simulator import SlowdownTrace, calibration
from dynamix_lab.simulator.compute import Costs
from dynamix_lab.simulator.disturbances import Slowdowns
from tests.refused import refused


def test_shipped_figures_are_good_fits_and_grow_as_noise_does() -> None:
    models = calibration().affine_models()
    assert {"cifar10", "imagenet", "bert"} <= set(models)
    for fits in models.values():
        assert min(fit.r2 for fit in fits) >= 0.9
        assert len({fit.alpha_s for fit in fits}) == len(fits)
    for curve in calibration().noise.values():
        assert curve.rho > -0.1  # deepspeech2 and yolov3: no growth with the batch
        assert curve.knots[-1] > curve.knots[0]
    assert calibration().held_out["gavel"]["inside"]["mean_absolute"] < 0.11  # some of its jobs are not affine
    refused(ConfigError, "cifar10", calibration().of, "alexnet", "T4")
    refused(ConfigError, "A100", calibration().of, "bert", "H9000")


def test_a_curve_gives_the_measured_time_and_inverts() -> None:
    name = calibration().curve_names[0]
    fit = calibration().of(*name)
    costs = Costs(np.array([[fit.alpha_s]]), np.array([[fit.beta_s]]), np.array([[0]]))
    sizes = np.arange(1.0, fit.batch_max + 1)
    seconds = np.array([float(costs.seconds(np.array([[b]]))[0, 0]) for b in sizes])
    for budget in np.quantile(seconds, [0.3, 0.6, 0.9]):
        found = float(costs.within(np.array([[budget]]), np.ones((1, 1)), np.array([[float(fit.batch_max)]]))[0, 0, 0])
        largest = sizes[seconds <= budget].max()
        assert abs(found - largest) <= 1.6 + 0.03 * largest, (budget, found, largest)


def test_a_cliff_costs_nothing_before_it_and_more_than_its_share_after() -> None:
    costs = Costs(np.array([[0.01]]), np.array([[0.001]]), None, np.array([[64.0]]), np.array([[1.0]]))
    at, beyond = (float(costs.seconds(np.array([[b]]))[0, 0]) for b in (64.0, 128.0))
    assert at == pytest.approx(0.074)
    assert beyond == pytest.approx(2 * 0.138)


def test_workers_of_a_group_slow_down_together_and_others_do_not() -> None:
    group = np.array([[0, 0, 1, 1]])
    shape = (1, 4)
    process = Slowdowns(3, np.full(shape, 10.0), np.full(shape, 5.0), np.full(shape, 3.0), group=group)
    seen = np.array([process.at(np.array([t]))[0].copy() for t in np.arange(0, 200, 1.0)])
    np.testing.assert_array_equal(seen[:, 0], seen[:, 1])
    np.testing.assert_array_equal(seen[:, 2], seen[:, 3])
    assert (seen[:, 0] != seen[:, 2]).any()


TRACE = "time_s,0,1\n0,1,1\n10,2,1\n20,1,1.5\n"


def test_a_trace_is_replayed_by_wall_clock_and_its_last_row_holds(tmp_path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    trace = SlowdownTrace.load(tmp_path / "t.csv")
    assert trace.at(np.array([0.0, 9.9, 10.0, 25.0, 1e6])).tolist() == [[1, 1], [1, 1], [2, 1], [1, 1.5], [1, 1.5]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time_s,0,1\n0,1,1\n10,,1\n", ":3"),
        ("time_s,0,1\n0,1\n", "cells at"),
        ("time_s,0,1\n0,1,-1\n", "line 2"),
        ("time_s,0,1\n0,1,nan\n", "not finite"),
        ("time_s,0,1\n0,1,1\n5,1,1\n5,1,2\n", "line 4"),
        ("time_s,0,1\n3,1,1\n", "line 2"),
        ("0,1,1\n", "head"),
        ("", "head"),
    ],
)
def test_a_bad_trace_is_refused_with_the_line_that_is_wrong(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    refused(ConfigError, says, SlowdownTrace.load, path)
    refused(ConfigError, "can be read", SlowdownTrace.load, tmp_path / "none.csv")
