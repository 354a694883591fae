"""`dynamix bench lengths`."""

from __future__ import annotations

from dynamix.errors import ConfigError
from dynamix_lab.suites.lengths import LengthsPlan, run_cell, table
from tests.refused import refused


def test_lengths_gain_for_every_policy() -> None:
    plan = LengthsPlan.of(quick=True)
    found = run_cell(plan, "data-dependent", 8)
    for name in plan.policies:
        assert found["policies"][name]["gain"]["median"] > 1.0, name
    assert found["policies"]["goodput"]["with"]["median"] == 1.0
    assert "data-dependent-8" in table({"cells": {"data-dependent-8": found}}).markdown()


def test_impossible_plans_are_named() -> None:
    refused(ConfigError, "affine-quiet", LengthsPlan((("affine-quiet", 8),)).check)
    refused(ConfigError, "goodput", LengthsPlan((("data-dependent", 8),), policies=("dynamix",)).check)
