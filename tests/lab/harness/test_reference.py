"""The reference of device hosts: everybody finishes at the same time."""

from __future__ import annotations

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.window import Bounds, Window
from dynamix_lab.emulator import Scenario, host_speeds, load_scenario
from dynamix_lab.harness.reference import Reference, references
from tests.refused import refused


@pytest.mark.parametrize("fixed_ms", [1.0, 20.0])
def test_device_hosts_finish_together_with_their_fixed_time(fixed_ms: float) -> None:
    speeds = np.array([1.0, 0.5])
    device = {"fixed_ms": fixed_ms, "per_sample_ms": 1.0}
    scenario = Scenario.model_validate({"hosts": [{"cpu": float(s)} for s in speeds], "device": device})
    reference = Reference(scenario, seed=0, clock=lambda: 0.0)
    window = Window.of([60, 60], compute=[0.1, 0.2], steps=5.0)
    sizes = reference.decide(window, Bounds.of(2, 1, 512))
    assert sizes.sum() == 120
    took = (fixed_ms + sizes) / speeds
    assert took[0] == pytest.approx(took[1], rel=0.03)


def test_the_reference_follows_the_scenario_at_a_constant_global_batch() -> None:
    now = {"s": 0.0}
    reference = Reference("demo", seed=3, clock=lambda: now["s"])
    window = Window.of([128] * 4, compute=0.2, steps=5)
    for time_s in (1.0, 16.0, 31.0, 46.0):
        now["s"] = time_s
        sizes = reference.decide(window, Bounds.of(4, 8, 512))
        speeds = host_speeds(load_scenario("demo"), time_s, 3)
        assert sizes.sum() == 512
        assert sizes.tolist() == pytest.approx([512 * v / sum(speeds) for v in speeds], abs=1)


def test_a_reference_may_hold_another_global_batch() -> None:
    window = Window.of([128] * 4, compute=0.2, steps=5)
    held = make_policy("reference:256", others=references("demo")).decide(window, Bounds.of(4))
    kept = make_policy("reference", others=references("demo")).decide(window, Bounds.of(4))
    assert (held.sum(), kept.sum()) == (256, 512)
    refused(ConfigError, "reference:NUMBER", make_policy, "reference:much", others=references("demo"))
