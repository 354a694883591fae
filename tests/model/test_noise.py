"""The noise scale by batch, and goodput put together."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dynamix.model import log_goodput
from dynamix.model.noise import NoiseByBatch
from dynamix.model.state import restored, saved


def test_the_first_noise_scale_is_taken_whole_and_later_ones_by_their_weight() -> None:
    noise = NoiseByBatch(0.25)
    for phi, ratio in (([np.nan, 10.0], 1.0), ([100.0, 10.0], 2.0), ([400.0, np.nan], 4.0), ([0.0, 40.0], 1.0)):
        noise = noise.update(np.array(phi), np.full(2, ratio))
    np.testing.assert_allclose(np.exp(noise.level), [100 * 4**0.25, 10 * 4**0.25])
    np.testing.assert_allclose(np.exp(noise.batch), [2 * 2**0.25, (2**0.25) ** 0.75])
    assert saved(noise.update(np.array([5.0, 5.0]), np.zeros(2))) == saved(noise)
    assert noise.update(np.array(7.0), np.array(1.0)).level.shape == ()


def test_phi_is_taken_to_grow_with_the_batch_it_is_asked_for() -> None:
    noise = NoiseByBatch().update(np.array(300.0), np.array(2.0))
    for total in (50.0, 100.0, 800.0):
        phi = 300.0 * (total / 100.0 / 2.0) ** 0.2
        expected = math.log((phi + total) / (phi + 100.0))
        assert float(noise.log_waste(np.array([total]), np.array(100.0))[0]) == pytest.approx(expected)
    assert np.isnan(
        NoiseByBatch().update(np.array(np.nan), np.array(1.0)).log_waste(np.array([8.0]), np.array(4.0))
    ).all()


def test_a_restored_noise_scale_is_the_one_that_was_saved() -> None:
    noise = NoiseByBatch().update(np.array([3.0, np.nan]), np.ones(2))
    again = restored(NoiseByBatch(), json.loads(json.dumps(saved(noise))))
    np.testing.assert_array_equal(again.level, noise.level)
    np.testing.assert_array_equal(again.batch, noise.batch)


def test_goodput_is_samples_a_second_over_the_waste() -> None:
    total, step, waste = np.array([100.0, 0.0]), np.log([0.5, 0.5]), np.log([4.0, 1.0])
    np.testing.assert_allclose(np.exp(log_goodput(total, step, waste)), [50.0, 2e-9])
