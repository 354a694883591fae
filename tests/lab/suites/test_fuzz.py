"""Some damaged inputs of every kind; `scripts/fuzz` tries as many as there is time for."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.results.tables import markdown_of
from dynamix_lab.suites.fuzz import mutations
from dynamix_lab.suites.fuzz.guided import guided
from dynamix_lab.suites.fuzz.run import KINDS, fuzz
from dynamix_lab.suites.fuzz.suite import FuzzPlan, FuzzSuite
from dynamix_lab.suites.fuzz.targets import States, Target, targets

INPUTS = {"states": 60, "events": 200, "policy-files": 60, "scenarios": 60, "traces": 1000}
INPUTS |= {"handshakes": 1500, "worker-messages": 1500, "aggregator-messages": 1500}


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


def test_states_to_damage_are_the_same_on_every_machine(made: dict[str, Target]) -> None:
    one, other = made["states"], States()
    assert isinstance(one, States)
    assert [state["checksum"] for state in one.states] == [state["checksum"] for state in other.states]


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


def test_a_run_goes_on_where_it_ended_and_adds_its_cells_up(tmp_path: Path) -> None:
    for inputs in (50, 120):
        plan = FuzzPlan(("traces", "events"), inputs, cell=50)
        result = run_suite(FuzzSuite(plan), RunFolder("fuzz", tmp_path / "run", resume=inputs > 50))
    assert result["inputs"] == 300
    assert result["kinds"]["traces"]["inputs"] == 150
    assert result["kinds"]["events"]["escapes"] == {}
    assert markdown_of({**result, "command": "dynamix bench fuzz"}).count("\n") >= 3
    assert len(list((tmp_path / "run" / "cells").iterdir())) == 6


@pytest.mark.parametrize("kind", ["traces", "states"])
def test_inputs_led_by_coverage_give_the_same_figures(kind: str) -> None:
    pytest.importorskip("atheris")
    found = guided(kind, inputs=60, seed=1)
    assert found["inputs"] == found.get("taken", 0) + found.get("refused", 0) == 60
    assert found["escapes"] == {}


def test_what_cannot_be_fuzzed_is_named() -> None:
    with pytest.raises(ConfigError, match="policy-files"):
        FuzzPlan(("dreams",)).check()


def test_a_mutation_changes_nothing_of_what_it_is_given() -> None:
    given_, rng = {"a": [1, 2, {"b": (1.5, "x")}]}, random.Random(0)
    before = repr(given_)
    assert any(repr(mutations.value(given_, rng)) != before for _ in range(20))
    assert repr(given_) == before
