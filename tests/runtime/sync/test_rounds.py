"""A round of `accumulate` pieces: what policies, bounds, events and replays count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynamix
from dynamix.errors import ConfigError
from dynamix.features import features
from dynamix.model.measured import base_total, noise_scale
from dynamix.window import Window
from tests.runtime.jobs import Training, adaptive, classes, decided
from tests.union import Script, Watching

DATA = classes(400)


def trained(
    policy: Any, *, accumulate: int = 2, epochs: int = 1, **options: Any
) -> tuple[list[int], dynamix.Controller]:
    """Sizes of the batches of a job in one process."""
    job = Training(adaptive(policy, 4, accumulate=accumulate, **options), DATA)
    sizes = []
    for x, y in job.batches(epochs):
        sizes.append(len(x))
        loss = job.loss(x, y)
        (loss / accumulate).backward()
        job.finish(loss=loss)
    job.controller.close()
    return sizes, job.controller


def test_a_round_has_accumulate_pieces_of_the_batch_size() -> None:
    policy = Watching([[24], [14]])
    sizes, _ = trained(policy, max_batch_size=16)
    window, bounds = policy.windows[0], policy.bounds[0]
    assert (window.batch_size.tolist(), float(window.base_batch), float(window.micro_batches)) == ([8], 8.0, 2.0)
    assert float(window.global_batch) == 8.0
    assert (bounds.low.tolist(), bounds.high.tolist(), int(bounds.total_high), bounds.quantum) == ([2], [32], 32, 2)
    assert sizes[:4] == [4, 4, 4, 4]
    assert {12, 7} <= set(sizes)
    assert sum(sizes) == len(DATA)


def test_controller_counts_rounds_too() -> None:
    controller = dynamix.Controller(
        "static", batch_size=4, accumulate=3, max_batch_size=10, max_global_batch=20, global_batch="adaptive"
    )
    assert (controller.batch_sizes.tolist(), controller.base_batch) == ([12], 12)
    assert (controller.bounds.high.tolist(), int(controller.bounds.total_high)) == ([30], 18)


def test_a_fixed_round_is_the_starting_one() -> None:
    controller = dynamix.Controller("goodput", batch_size=4, accumulate=3, global_batch="fixed")
    assert int(controller.bounds.total_low) == int(controller.bounds.total_high) == 12


def test_errors_name_what_the_user_wrote() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size=2.*at least min_batch_size=3"):
        dynamix.Controller(
            "static", batch_size=3, accumulate=4, min_batch_size=3, max_batch_size=2, global_batch="adaptive"
        )
    with pytest.raises(ConfigError, match="batch_size=9"):
        dynamix.Controller("static", batch_size=9, accumulate=4, max_batch_size=8, global_batch="adaptive")


def test_events_count_rounds_and_a_replay_repeats_them(tmp_path: Path) -> None:
    whole, _ = trained(Script([[24], [14]]), events=tmp_path / "events.jsonl", epochs=2)
    first = decided(tmp_path / "events.jsonl")[0]
    assert (first["window"]["batch_size"], first["allocation"], first["from_step"]) == ([8], [24], 3)
    again, _ = trained(Script([[2]]), replay=tmp_path / "events.jsonl", epochs=2)
    assert again == whole


def test_a_window_of_rounds_is_seen_like_one_without_pieces() -> None:
    known = {"compute": [0.2, 0.4], "wait": [0.2, 0.0], "noise": 900.0, "signal": 1.5, "base_batch": 32}
    one, four = (Window.of([24, 8], micro_batches=pieces, **known) for pieces in (1, 4))
    np.testing.assert_array_equal(features(one), features(four))
    assert float(base_total(four)) == 32.0
    assert float(noise_scale(four)) == 600.0
