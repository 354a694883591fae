"""What an aggregator carries, and a few hostile frames; `dynamix bench aggregator` tries a million."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.protocol import ADD, OR, pack
from dynamix_lab.results.record import load
from dynamix_lab.results.tables import markdown_of
from dynamix_lab.suites.aggregator.hostile import LIMITS, TARGETS, Hung, combined, contributions, frames, limited
from dynamix_lab.suites.aggregator.returning import summary
from dynamix_lab.suites.aggregator.suite import AggregatorPlan
from dynamix_lab.suites.fuzz.run import fuzz

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", TARGETS)
def test_hostile_frames_give_an_error_of_ours_or_an_exact_sum(kind: str) -> None:
    found = fuzz(TARGETS[kind](), inputs=1500, seconds=20, seed=3)
    assert found["escapes"] == {}
    assert found["refused"] > 100
    assert found["taken"] > 20


def test_contributions_end_where_a_stream_is_damaged() -> None:
    values = np.frombuffer(random.Random(0).randbytes(4096), np.uint8)
    sent = frames(ADD, [values], LIMITS.chunk_bytes)
    due = [head for head, _ in sent]
    stream = bytearray(b"".join(pack(head, payload) + payload.tobytes() for head, payload in sent))
    assert len(contributions(bytes(stream), due)) == 4
    stream[3000] ^= 1
    assert len(contributions(bytes(stream), due)) == 2


def test_what_is_combined_is_exact() -> None:
    parts = [np.array([2**31 - 1, -5], np.int32).view(np.uint8), np.array([1, 5], np.int32).view(np.uint8)]
    assert combined(ADD, parts).view(np.int32).tolist() == [-(2**31), 0]
    assert np.array_equal(combined(OR, parts), parts[0] | parts[1])


def test_what_does_not_end_is_ended() -> None:
    with pytest.raises(Hung), limited(0.05):
        signal.pause()


def test_what_was_recorded_has_no_wrong_sum_and_steps_without_an_aggregator_are_told_apart() -> None:
    recorded = load("results/aggregator-*", ROOT)
    assert "0 wrong sums, 0 hangs" in markdown_of(recorded)
    assert set(recorded["hostile"]) == {*TARGETS, "connections"}
    run = [{"s": 0.01, "lost": 0, "rejoined": 0, "away": away, "there": True} for away in (False, True)]
    more, less = (markdown_of({**recorded, "returning": found}) for found in (summary(run), None))
    assert more.count("\n") > less.count("\n") > 10


def test_a_plan_that_cannot_be_run_is_named() -> None:
    with pytest.raises(ConfigError, match="workers"):
        AggregatorPlan((0,)).check()
    assert sum(map(sum, map(AggregatorPlan().frames_of, ("handshakes", "connections")))) == 320_000
