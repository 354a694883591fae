"""Arguments of `Controller` beyond those in test_controller: wrong types are refused, not rounded or passed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dynamix
from dynamix.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"min_batch_size": 2.5}, "min_batch_size=2.5"),
        ({"min_batch_size": True}, "min_batch_size=True"),
        ({"max_batch_size": [8.5]}, "max_batch_size=[8.5]"),
        ({"max_batch_size": "64"}, "max_batch_size='64'"),
        ({"quantum": 0}, "quantum=0"),
        ({"quantum": 2.0}, "quantum=2.0"),
        ({"accumulate": True}, "accumulate=True"),
    ],
)
def test_wrong_types_name_the_value(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dynamix.Controller("static", 8, **{"global_batch": "adaptive", **arguments})
    assert named in str(caught.value)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    controller = dynamix.Controller(
        "static", 8, min_batch_size=np.int64(4), max_batch_size=np.array([16]), global_batch="adaptive"
    )
    assert (controller.bounds.low.tolist(), controller.bounds.high.tolist()) == ([4], [16])
