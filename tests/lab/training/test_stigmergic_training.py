"""The stigmergic rule's numbers are learned reproducibly, and never shipped worse than those set by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dynamix.policies.stigmergic.policy import RANGES, Parameters, StigmergicPolicy
from dynamix_lab.training.stigmergic import SearchConfig, _validate, _world, from_logits, to_logits, train

TINY = SearchConfig(
    **{"stages": ((2,),), "generations": (1,), "tried": 3, "kept": 2, "worlds": 1, "rows": 12, "windows": 6},
    **{"validation_workers": (2,), "validation_clusters": 6},
)


def test_a_seed_gives_the_same_numbers_and_the_best_on_validation_is_kept() -> None:
    first, again = train(TINY, seed=5), train(TINY, seed=5)
    assert first.parameters == again.parameters
    by_hand, learned = first.about["validation"]
    assert (first.parameters == Parameters()) == (learned <= by_hand)


def test_a_worlds_noise_is_what_was_drawn() -> None:
    def at(noise: float) -> float:
        world = _world(dataclasses.replace(TINY, noisier=(noise,)), 4, np.random.default_rng(7))
        return float(world(lambda _: StigmergicPolicy()).mean())

    assert at(16.0) != at(1.0)
    assert at(1.0) == at(1.0)


def test_validation_takes_the_least_and_the_most_noise() -> None:
    def score(*noisier: float) -> float:
        return _validate(dataclasses.replace(TINY, noisier=noisier), StigmergicPolicy, Parameters())

    assert score(1.0, 4.0, 16.0) == pytest.approx(np.sqrt(score(1.0) * score(16.0)))


def test_numbers_never_leave_their_ranges() -> None:
    drawn = from_logits(5.0 * np.random.default_rng(0).normal(size=len(RANGES)))
    for name, value in dataclasses.asdict(drawn).items():
        assert RANGES[name][0] <= value <= RANGES[name][1]
    np.testing.assert_allclose(to_logits(from_logits(to_logits(Parameters()))), to_logits(Parameters()), atol=1e-9)
