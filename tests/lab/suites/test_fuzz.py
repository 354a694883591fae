"""Some damaged inputs of every kind; `scripts/fuzz` tries as many as there is time for."""

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
from dynamix_lab.results.tables import markdown_of
from dynamix_lab.suites.fuzz import mutations
from dynamix_lab.suites.fuzz.frames import LIMITS, Hung, combined, contributions, frames, limited
from dynamix_lab.suites.fuzz.run import KINDS, fuzz
from dynamix_lab.suites.fuzz.suite import FuzzPlan, FuzzSuite
from dynamix_lab.suites.fuzz.targets import Target, targets
from tests.refused import refused

INPUTS = {"states": 40, "events": 150, "policy-files": 40, "scenarios": 40, "traces": 500}
INPUTS |= {"handshakes": 700, "worker-messages": 700, "aggregator-messages": 700}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    known = targets(tmp_path_factory.mktemp("fuzz"))
    return {kind: known[kind]() for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_no_foreign_error_escapes(kind: str, made: dict[str, Target]) -> None:
    found = fuzz(made[kind], inputs=INPUTS[kind], seconds=60, seed=5)
    assert found["escapes"] == {}
    assert found.get("refused", 0) > 0
    assert found.get("taken", 0) > 0


def test_an_escape_is_counted_and_named() -> None:
    class Broken:
        name = "broken"

        def attempt(self, rng: random.Random) -> bool:
            if rng.random() < 0.5:
                raise KeyError("x")
            return True

    found = fuzz(Broken(), inputs=100, seconds=60, seed=0)
    assert found["foreign"] + found["taken"] == 100
    refused(ConfigError, "policy-files", FuzzPlan(("dreams",)).check)
    assert [key.split(" ")[0] for key in found["escapes"]] == ["KeyError"]


def test_a_run_goes_on_where_it_ended_and_adds_its_cells_up(tmp_path: Path) -> None:
    for inputs in (20, 50):
        plan = FuzzPlan(("traces", "events"), inputs, cell=20)
        result = run_suite(FuzzSuite(plan), RunFolder("fuzz", tmp_path / "run", resume=inputs > 20))
    assert result["inputs"] == 120
    assert result["kinds"]["traces"]["inputs"] == 60
    assert result["kinds"]["events"]["escapes"] == {}
    assert markdown_of({**result, "command": "dynamix bench fuzz"}).count("\n") >= 3
    assert len(list((tmp_path / "run" / "cells").iterdir())) == 6


def test_a_mutation_changes_nothing_of_what_it_is_given() -> None:
    given_, rng = {"a": [1, 2, {"b": (1.5, "x")}]}, random.Random(0)
    before = repr(given_)
    assert any(repr(mutations.value(given_, rng)) != before for _ in range(20))
    assert repr(given_) == before


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
