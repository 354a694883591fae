"""`dynamix bench disturbance`."""

from __future__ import annotations

import dataclasses

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.harness.suite import Cell, Context, untold
from dynamix_lab.suites.disturbance import DisturbancePlan, DisturbanceSuite, disturbed, table
from tests.refused import refused


def test_every_policy_is_compared_with_equal_shares_and_the_rule_cuts_their_time() -> None:
    plan = dataclasses.replace(DisturbancePlan.of(quick=True), policies=("static", "dbs", "goodput"), epochs=8)
    suite = DisturbanceSuite(plan)
    context = Context(None, {}, untold)  # type: ignore[arg-type]
    found = suite.run(Cell("alike-4", ("alike", 4)), context)
    assert found["time_over_static"]["static"]["median"] == 1.0
    assert found["time_over_static"]["goodput"]["median"] < 1.0
    assert "alike-4" in table({"cells": {"alike-4": found}}).markdown()


def test_workers_that_are_alike_differ_by_the_disturbance_only() -> None:
    clusters = disturbed("alike", DisturbancePlan.of(quick=True), 4, 7)
    for costs in (clusters.alpha, clusters.beta):
        assert (costs == costs[:, :1]).all()
    assert (np.asarray(clusters.slow_weakest) > 1).all()
    assert (clusters.slow_strongest > np.asarray(clusters.slow_weakest)).all()


def test_impossible_plans_are_named() -> None:
    refused(ConfigError, "unknown", DisturbancePlan((("unknown", 4),)).check)
    refused(ConfigError, "static", DisturbancePlan(policies=("dbs",)).check)
