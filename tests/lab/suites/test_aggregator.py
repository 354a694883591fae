"""What an aggregator carries, and a few hostile frames; `dynamix bench aggregator` tries a million."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_homomorphic.aggregator.protocol import ADD, OR, pack
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.results.views import markdown_of
from dynamix_lab.suites.aggregator.hostile import LIMITS, TARGETS, Hung, combined, contributions, frames, limited
from dynamix_lab.suites.aggregator.returning import summary
from dynamix_lab.suites.aggregator.suite import AggregatorPlan, AggregatorSuite
from dynamix_lab.suites.fuzz.run import fuzz


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


def test_a_short_run_has_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix_lab.suites.aggregator.suite.have_openssl", lambda: False)  # two servers fewer
    plan = AggregatorPlan((2,), buffer_mb=1, repeats=1, seconds=0.2, returning_s=0.0, frames=2000, cell=2000)
    result = run_suite(AggregatorSuite(plan), RunFolder("aggregator", tmp_path / "run"))
    whole = result["frames"]
    assert (whole["inputs"], whole["wrong"], whole["hung"], whole["other"]) == (2000, 0, 0, 0)
    assert set(result["hostile"]) == {*TARGETS, "connections"}
    assert result["waiting"]["plain"]["longest_s"] < 20
    rates = result["throughput"][0]["contenders"]
    assert rates["echo"]["of_line"] == 1
    assert all(found["bytes_per_core_s"] > 1e6 for found in rates.values())
    text = markdown_of({**result, "command": "dynamix bench aggregator"})
    assert "0 wrong sums, 0 hangs" in text
    run = [{"s": 0.01, "lost": 0, "rejoined": 0, "away": away, "there": True} for away in (False, True)]
    more = markdown_of({**result, "returning": summary(run), "command": "dynamix bench aggregator"})
    assert more.count("\n") > text.count("\n") > 10


def test_a_plan_that_cannot_be_run_is_named() -> None:
    with pytest.raises(ConfigError, match="workers"):
        AggregatorPlan((0,)).check()
    assert sum(map(sum, map(AggregatorPlan().frames_of, ("handshakes", "connections")))) == 320_000
