"""Traces that fade at every step, late ones, noisy ones, and what they tell."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dynamix.errors import ConfigError, StateError
from dynamix_lab.excavation.fading import Decay, FadingField
from dynamix_lab.excavation.foretelling import area_under_roc, somebody_is_coming
from dynamix_lab.excavation.ground import GROUNDS
from dynamix_lab.excavation.world import Excavation, ExcavationConfig
from tests.refused import refused

TASK = ExcavationConfig(GROUNDS["single-file"], signs="typed", horizon=100)


@pytest.mark.parametrize("decay", [Decay(), Decay(0.0, 0.4, 0.0)])
def test_it_is_the_rule_of_the_paper_step_by_step(decay: Decay) -> None:
    rng, cells = np.random.default_rng(0), 7
    fading = FadingField(np.ones(cells, dtype=bool), decay, worlds=3)
    rho = np.full((3, cells), decay.start)
    for _ in range(1, 30):
        visited, amount = rng.integers(cells, size=(3, 2)), rng.random((3, 2))
        fading.fade()
        fading.deposit(visited, amount)
        rho = (1 - decay.alpha) * rho
        for world, cell in np.ndindex(visited.shape):
            rho[world, visited[world, cell]] += decay.beta * amount[world, cell]
    np.testing.assert_allclose(fading.value, rho, rtol=1e-12)
    asked = rng.integers(cells, size=(3, 4, 5))
    np.testing.assert_array_equal(fading.smelt(asked)[1], fading.value[1][asked[1]])


def test_traces_that_come_late_are_those_of_some_steps_ago_and_a_state_has_them() -> None:
    def moved(env: Excavation, steps: int) -> np.ndarray:
        rng = np.random.default_rng(3)
        found = [env.step(rng.integers(5, size=(2, 4)))[0] for _ in range(steps)]
        return np.stack(found)[..., env.config.traces][..., :75]

    now, late = (Excavation(dataclasses.replace(TASK, late=n), agents=4, worlds=2, seed=1) for n in (0, 2))
    at = now.place[..., None] + now._wide
    values = []
    for step in range(6):
        action = np.full((2, 4), step % 5)
        now.step(action)
        late.step(action)
        values.append(now.field.value.copy())
        at = late.place[..., None] + late._wide
        if step >= 2:
            expected = np.stack([values[step - 2][b][at[b]] for b in range(2)])
            np.testing.assert_allclose(late.observe()[..., late.config.traces][..., :75], expected, rtol=1e-6)
    other = Excavation(dataclasses.replace(TASK, late=2), agents=4, worlds=2, seed=9)
    other.load_state_dict(late.state_dict())
    np.testing.assert_array_equal(moved(other, 4), moved(late, 4))


def test_noise_is_on_traces_alone_and_repeats_from_its_seed() -> None:
    clean, *noisy = (Excavation(dataclasses.replace(TASK, noise=n), agents=3, worlds=2, seed=1) for n in (0, 0.5, 0.5))
    seen = [env.observe() for env in (clean, *noisy)]
    own = TASK.traces.start
    np.testing.assert_array_equal(seen[0][..., :own], seen[1][..., :own])
    np.testing.assert_array_equal(seen[0][..., -2:], seen[1][..., -2:])
    assert 0.2 < seen[1][..., own:-2].std() < 0.6
    np.testing.assert_array_equal(seen[1], seen[2])


def test_typed_traces_tell_best_whether_somebody_laden_is_coming() -> None:
    told = somebody_is_coming(TASK, worlds=4, steps=300, updates=150)
    assert told["typed"] > told["visits"] > told["none"] > 0.4
    assert told["typed"] > 0.8
    assert np.isnan(area_under_roc(np.array([1.0]), np.array([True])))


def test_impossible_traces_are_refused() -> None:
    refused(ConfigError, "alpha", Decay, alpha=1.5)
    refused(ConfigError, "beta", Decay, beta=-1.0)
    refused(ConfigError, "late", FadingField, np.ones(2, dtype=bool), Decay(), worlds=1, late=-1)
    with pytest.raises(StateError, match="cells"):
        FadingField(np.ones(2, dtype=bool), Decay(), worlds=1).load_state_dict({"value": np.zeros((1, 3)), "past": []})
