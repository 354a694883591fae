"""What importing the controller costs, as `dynamix bench import` measures it."""

from __future__ import annotations

import pytest

from dynamix.errors import ConfigError
from dynamix_lab.suites.import_cost import import_cost, lines


def test_the_controller_is_cheap_beside_torch() -> None:
    result = import_cost(1)
    assert result["within"] == (result["processor"]["ratio"] <= result["goal"])
    assert 0.0 < result["processor"]["ratio"] < 2 * result["goal"], "one run on a busy machine; FSDP alone was 0.3"
    assert len(lines(result)) == 3


def test_a_measurement_needs_a_run() -> None:
    with pytest.raises(ConfigError, match="runs=0"):
        import_cost(0)
