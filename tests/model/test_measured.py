"""What a window says by itself."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix.model.measured import (
    base_total,
    busy_seconds,
    exposed_seconds,
    noise_scale,
    slowest_seconds,
    step_seconds,
)
from dynamix.window import Window


def test_seconds_of_the_slowest_are_computing_and_waiting_together() -> None:
    window = Window.of([4, 4], compute=[0.1, 0.2], wait=[0.15, 0.05], communication=[0.03, np.nan], data=[np.nan, 0.01])
    assert float(slowest_seconds(window)) == pytest.approx(0.25)
    assert float(exposed_seconds(window)) == pytest.approx(0.03)
    np.testing.assert_allclose(busy_seconds(window), [0.1, 0.21])


def test_idle_workers_and_impossible_times_say_nothing() -> None:
    window = Window.of([4, 0, 4, 4, 4], compute=[0.1, 0.1, 0.0, np.inf, -0.1], wait=0.0, communication=-1.0)
    assert busy_seconds(window).tolist()[0] == 0.1
    assert np.isnan(busy_seconds(window)[1:]).all()
    assert np.isnan(exposed_seconds(window))
    assert np.isnan(slowest_seconds(Window.of([4, 4])))
    assert float(slowest_seconds(Window.of([4, 4], compute=[0.1, 0.4], wait=[0.2, np.nan]))) == 0.4
    assert float(exposed_seconds(Window.of([4, 4], communication=[0.0, 0.02]))) == pytest.approx(0.01)


def test_a_step_is_the_slowest_worker_and_the_exchange_if_that_is_known() -> None:
    assert float(step_seconds(Window.of([4, 4], compute=[0.1, 0.3], communication=0.2))) == pytest.approx(0.5)
    assert float(step_seconds(Window.of([4, 4], compute=[0.1, 0.3]))) == pytest.approx(0.3)
    assert np.isnan(step_seconds(Window.of([4, 4], communication=0.2)))


@pytest.mark.parametrize("base", [np.nan, 0.0, -5.0, np.inf])
def test_the_base_batch_counts_per_round_and_is_the_present_one_where_unknown(base: float) -> None:
    assert float(base_total(Window.of([40, 60], base_batch=400, micro_batches=2))) == 400.0
    assert float(base_total(Window.of([40, 60], base_batch=base, micro_batches=2))) == 100.0
    assert float(base_total(Window.of([0, 0], base_batch=base))) == 1.0


def test_the_noise_scale_counts_samples_of_a_round_and_is_kept_within_reason() -> None:
    def of(noise: float, signal: float = 1.0) -> float:
        return float(noise_scale(Window.of([50, 50], noise=noise, signal=signal, micro_batches=2.0, base_batch=100)))

    assert of(300.0) == 300.0
    assert [of(1e12), of(1.0, 0.0), of(0.001), of(0.0)] == [1e5, 1e5, 0.1, 0.1]
    assert np.isnan(of(np.nan))
