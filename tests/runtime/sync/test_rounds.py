"""A round of `accumulate` pieces: what policies, bounds, events and replays count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dynamix
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


def test_events_count_rounds_and_a_replay_repeats_them(tmp_path: Path) -> None:
    whole, _ = trained(Script([[24], [14]]), events=tmp_path / "events.jsonl", epochs=2)
    first = decided(tmp_path / "events.jsonl")[0]
    assert (first["window"]["batch_size"], first["allocation"], first["from_step"]) == ([8], [24], 3)
    again, _ = trained(Script([[2]]), replay=tmp_path / "events.jsonl", epochs=2)
    assert again == whole
