"""What damaged frames of an aggregator are judged by: whole contributions, exact sums, and an end."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest

from dynamix_homomorphic.aggregator.protocol import ADD, OR, pack
from dynamix_lab.suites.fuzz.frames import LIMITS, Hung, combined, contributions, frames, limited


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
