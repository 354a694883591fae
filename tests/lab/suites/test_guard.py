"""`dynamix bench guard`: no adversary under a guard is far from the goodput rule."""

from __future__ import annotations

import pytest

from dynamix_lab.suites.guard import ADVERSARIES, BOUND, GuardPlan, adversaries_guarded, table

SMALL = GuardPlan(families=("affine-slowdowns",), workers=(4,), rows=64, windows=60, seeds=(5,))


@pytest.mark.filterwarnings("ignore:the policy:RuntimeWarning")
def test_a_guarded_adversary_keeps_at_least_the_bound_of_the_rules_speed() -> None:
    result = adversaries_guarded(SMALL)
    assert len(ADVERSARIES) == 10
    for name, found in result["adversaries"].items():
        assert found["speed"][2] >= BOUND, (name, found)
        assert found["speed"][0] >= BOUND - 0.02, (name, found)
    assert all(name in table(result).markdown() for name in ADVERSARIES)
