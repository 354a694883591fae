"""Some damaged inputs of every kind; `scripts/fuzz` tries as many as there is time for."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamix_lab.suites.fuzz import mutations
from dynamix_lab.suites.fuzz.run import KINDS, fuzz, main
from dynamix_lab.suites.fuzz.targets import Target, targets

INPUTS = {"states": 60, "events": 200, "policy-files": 60, "scenarios": 60, "traces": 1000}


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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**64))
def test_whatever_is_drawn_is_refused_or_taken(kind: str, seed: int, made: dict[str, Target]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made[kind].attempt(random.Random(seed))


def test_an_escape_is_counted_and_named(tmp_path: Path) -> None:
    class Broken:
        name = "broken"

        def attempt(self, rng: random.Random) -> bool:
            if rng.random() < 0.5:
                raise KeyError("x")
            return True

    found = fuzz(Broken(), inputs=100, seconds=60, seed=0)
    assert found["foreign"] + found["taken"] == 100
    assert [key.split(" ")[0] for key in found["escapes"]] == ["KeyError"]


def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    assert main(["--kinds", "traces", "--inputs", "50", "--out", str(tmp_path / "fuzz.json")]) == 0
    assert json.loads((tmp_path / "fuzz.json").read_text())["traces"]["inputs"] == 50


def test_a_mutation_changes_nothing_of_what_it_is_given() -> None:
    given_, rng = {"a": [1, 2, {"b": (1.5, "x")}]}, random.Random(0)
    before = repr(given_)
    assert any(repr(mutations.value(given_, rng)) != before for _ in range(20))
    assert repr(given_) == before
