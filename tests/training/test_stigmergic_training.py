"""The stigmergic rule's numbers are learned reproducibly, and never shipped worse than those set by hand."""

from __future__ import annotations

import dataclasses

import numpy as np

from dynamix.policies.stigmergic.policy import RANGES, Parameters
from dynamix.training.stigmergic import SearchConfig, from_logits, to_logits, train

TINY = SearchConfig(
    stages=((2,),),
    generations=(1,),
    tried=3,
    kept=2,
    worlds=1,
    rows=12,
    windows=6,
    validation_workers=(2,),
    validation_clusters=6,
)


def test_a_seed_gives_the_same_numbers_and_the_best_on_validation_is_kept() -> None:
    first, again = train(TINY, seed=5), train(TINY, seed=5)
    assert first.parameters == again.parameters
    by_hand, learned = first.about["validation"]
    assert (first.parameters == Parameters()) == (learned <= by_hand)


def test_training_meets_worlds_in_which_larger_batches_are_better() -> None:
    settings = {"noisier": (64.0,), "generations": (0,)}
    usual, noisy = (
        train(dataclasses.replace(TINY, **some)).about["validation"][0] for some in ({"generations": (0,)}, settings)
    )
    assert usual != noisy


def test_numbers_never_leave_their_ranges() -> None:
    drawn = from_logits(5.0 * np.random.default_rng(0).normal(size=len(RANGES)))
    for name, value in dataclasses.asdict(drawn).items():
        assert RANGES[name][0] <= value <= RANGES[name][1]
    np.testing.assert_allclose(to_logits(from_logits(to_logits(Parameters()))), to_logits(Parameters()), atol=1e-9)
