"""Progress read from held-out loss: what a figure of it means, and how far noise moves it."""

import json
import math

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix_lab.yardstick import ProgressCurve, time_to_loss
from tests.refused import refused


def loss_at(samples):
    """A job's true curve: 2.3 at 100 samples, falling by 0.2 with every doubling."""
    return 2.3 - 0.2 * np.log2(np.maximum(samples, 1e-9) / 100)


KNOTS = np.geomspace(100, 40_000, 40)
CURVE = ProgressCurve.of("job", [[(s, float(loss_at(s))) for s in KNOTS]])


def run(rate, *, every_s=1.0, until_s=60.0, noise=0.0, seed=0):
    """A run that gains `rate` equivalent samples a second: its clock and its losses."""
    times = np.arange(every_s, until_s + every_s / 2, every_s)
    losses = loss_at(rate * times) + noise * np.random.default_rng(seed).standard_normal(len(times))
    return times, losses


def test_a_run_twice_as_fast_reads_exactly_two() -> None:
    slow, fast = CURVE.read(*run(200.0)), CURVE.read(*run(400.0))
    for clock in ({"to_s": 60.0}, {"to_s": 60.0, "from_s": 12.0}):
        assert slow.seconds_per_1000(**clock) / fast.seconds_per_1000(**clock) == pytest.approx(2.0, abs=1e-9)
    assert fast.at(30.0) / slow.at(30.0) == pytest.approx(2.0, abs=1e-9)
    assert slow.seconds_per_1000(60.0) == pytest.approx(5.0)
    assert (slow.before, slow.after) == (0, 0)
    reached = [time_to_loss(*run(rate), 1.0) for rate in (200.0, 400.0)]
    assert reached[0] / reached[1] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("every_s", [0.5, 4.0, 11.9])
def test_how_often_a_run_was_scored_does_not_change_what_it_reads(every_s) -> None:
    """Local SGD is scored where workers meet: rarely, and at times of its own."""
    read = CURVE.read(*run(250.0, every_s=every_s, until_s=72.0))
    assert read.seconds_per_1000(60.0) == pytest.approx(4.0, rel=1e-6)
    assert read.seconds_per_1000(60.0, 15.0) == pytest.approx(4.0, rel=1e-6)
    assert read.at(37.0) == pytest.approx(37 * 250.0, rel=1e-6)


def test_noise_of_scores_becomes_that_of_the_figure_by_the_curves_slope() -> None:
    """Here 0.2 of loss doubles the samples: a score's sd of 0.02 is 0.02 ln 2 / 0.2 = 6.9 % of its samples. Sixty
    scores on the line through the origin leave 1.34 / sqrt(60) of it, a free slope some three times that.
    """
    reads = [CURVE.read(*run(250.0, noise=0.02, seed=seed)) for seed in range(200)]
    one = 0.02 * math.log(2) / 0.2
    anchored = np.std(np.log([read.seconds_per_1000(60.0) for read in reads]))
    free = np.std(np.log([read.seconds_per_1000(60.0, 6.0) for read in reads]))
    assert anchored == pytest.approx(1.34 * one / math.sqrt(60), rel=0.25)
    assert 1.7 * anchored < free < 3.5 * anchored
    ours = [read.at(30.0) for read in reads]
    assert np.std(np.log(ours)) == pytest.approx(one / 3, rel=0.25)  # nine snapshots lie within 15 %
    assert np.mean(ours) == pytest.approx(7500, rel=0.02)


def test_what_lies_beyond_the_curve_is_clamped_and_counted() -> None:
    read = CURVE.read([1, 2, 3, 4], [math.inf, 1.0, -9.0, -8.0])
    assert (read.before, read.after) == (1, 2)
    assert read.samples[0] == pytest.approx(100)
    assert read.samples[-1] == read.samples[-2] == pytest.approx(40_000)


def test_a_curve_of_noisy_seeds_falls_and_keeps_to_the_truth() -> None:
    rng = np.random.default_rng(0)
    every = np.arange(100, 40_001, 100)
    seeds = [[(s, float(loss_at(s) + 0.02 * rng.standard_normal())) for s in every] for _ in range(3)]
    curve = ProgressCurve.of("job", seeds, about={"batch": 128})
    assert (np.diff(curve.losses) < 0).all()
    assert len(curve.samples) <= 64
    wrong = [math.log(curve.samples_of(float(loss_at(s))) / s) for s in np.geomspace(300, 35_000, 30)]
    assert np.abs(wrong).max() < 0.12
    assert np.abs(np.mean(wrong)) < 0.02


def test_a_plateau_is_one_point_and_a_loss_never_has_two_answers() -> None:
    curve = ProgressCurve.of("job", [[(100, 2.0), (200, 1.0), (400, 1.1), (800, 0.5)]])
    assert curve.losses == pytest.approx((2.0, 1.05, 0.5))
    assert curve.samples == pytest.approx((100, math.sqrt(200 * 400), 800))


def test_a_curve_survives_json() -> None:
    assert ProgressCurve.from_dict(json.loads(json.dumps(CURVE.to_dict()))) == CURVE


def test_a_run_that_ended_early_has_no_figure_rather_than_a_guess() -> None:
    read = CURVE.read(*run(250.0, until_s=50.0))
    assert math.isnan(read.seconds_per_1000(60.0))
    assert math.isnan(read.at(60.0))
    assert math.isnan(CURVE.read([1.0, 60.0], [0.5, 2.2]).seconds_per_1000(60.0, 1.0))  # it lost what it had


@pytest.mark.parametrize(
    "runs", [[], [[(100, 2.0)]], [[(100, 1.0), (200, 2.0)]], [[(100, 2.0), (200, math.nan)]], [[(0, 2.0)]]]
)
def test_a_reference_that_shows_no_progress_is_refused(runs) -> None:
    refused(ConfigError, "", ProgressCurve.of, "job", runs)


def test_bad_readings_are_refused() -> None:
    refused(ConfigError, "losses", CURVE.read, [1.0, 2.0], [1.0])
    refused(ConfigError, "losses", CURVE.read, [1.0], [math.nan])
    refused(ConfigError, "times_s", CURVE.read, [2.0, 1.0], [1.0, 1.0])
    refused(ConfigError, "from_s", CURVE.read(*run(250.0)).seconds_per_1000, 10.0, 10.0)
