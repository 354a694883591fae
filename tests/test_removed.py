"""What users wrote for an earlier version raises an error that says what to write now."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import dynamix
from dynamix import removed
from tests.refused import refused


def test_what_is_gone_says_what_to_write_and_what_is_to_be_imported_instead_is_there() -> None:
    for name in removed.NAMES:
        refused(ImportError, r"removed in 0\.3: write ", getattr, dynamix, name)
    for name, says in removed.MODULES.items():
        refused(ImportError, r"removed in 0\.3: write ", importlib.import_module, name)
        if found := re.match(r"import (dynamix_\S+) \(pip install \./(\w+),", says):
            importlib.import_module(found[1])
            assert (Path(__file__).parents[1] / found[2] / "pyproject.toml").is_file()
    moved = r"removed in 0\.3: write import dynamix_lab\.\w+ \(pip install \./lab, in"
    for name in ("dynamix.emulator.scenario", "dynamix.simulator.env", "dynamix.training.ppo"):
        refused(ImportError, moved, importlib.import_module, name)
    for name in ("Aggregator", "AggregatorWire", "ErrorFeedback", "LossyState", "lossy_hook", "lossy_topk_hook"):
        says = rf"removed in 0\.3: write from dynamix_homomorphic import {name} \(pip"
        refused(ImportError, says, getattr, dynamix.compression, name)
        exec(f"from dynamix_homomorphic import {name}", {})


@pytest.mark.parametrize(
    "wrote",
    [
        "import dynamix.emulator as e",
        "from dynamix import emulator",
        "from dynamix.emulator import load_scenario",
        "import dynamix; dynamix.emulator.load_scenario",
        "import dynamix; dynamix.training",
        "import importlib.util; importlib.util.find_spec('dynamix.emulator')",
        "import importlib.util; importlib.util.find_spec('dynamix.emulator.loading')",
        "from dynamix import LiveConfig",
        "from dynamix.compression.lossy import LossyState",
        "from dynamix.compression import lossy",
        "import dynamix; dynamix.compression.lossy",
        "from dynamix.compression import Aggregator",
        "from dynamix.policies import cannikin",
        "import pickle; pickle.loads(b'cdynamix.compression.lossy\\nLossyState\\n.')",
    ],
)
def test_however_a_module_that_is_gone_is_reached_it_says_what_to_write(wrote: str) -> None:
    with pytest.raises(ImportError, match=r"removed in 0\.3: write "):
        exec(wrote, {})


def test_other_names_and_modules_are_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        dynamix.nothing_like_it  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dynamix\.nothing_like_it'"):
        importlib.import_module("dynamix.nothing_like_it")


@pytest.mark.parametrize("make", [dynamix.Controller, dynamix.Settings])
@pytest.mark.parametrize("learn", [True, False])
def test_learning_on_the_job_says_what_to_write(make: Any, learn: bool) -> None:
    refused(dynamix.ConfigError, rf"learn={learn} .*removed in 0\.3: write no learn=", make, "dynamix", 8, learn=learn)


@pytest.mark.parametrize("name", ["learning:dynamix", "guarded:learning:dynamix", "learning:lb_bsp"])
def test_the_policy_to_write_in_place_of_one_that_learned_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dynamix.ConfigError, match=r"removed in 0\.3: write policy='") as told:
        dynamix.make_policy(name)
    dynamix.make_policy(str(told.value).partition("write policy='")[2].rstrip("'"))
    monkeypatch.setenv("DYNAMIX_POLICY", name)
    with pytest.raises(dynamix.ConfigError, match=r"removed in 0\.3: write policy='"):
        dynamix.Controller("static", 8)


@pytest.mark.parametrize("more", [("normalized",), ("samples", "bfloat16"), ("samples", None, True), (*[None] * 9,)])
def test_what_stood_third_and_later_in_averaging_says_what_to_write(more: tuple[Any, ...]) -> None:
    with pytest.raises(
        dynamix.ConfigError, match=r"removed in 0\.3: write Averaging\(optimizer_state, outer, wire=\.\.\.\)"
    ):
        dynamix.Averaging("kept", None, *more)
    assert dynamix.Averaging("kept", None, wire="bfloat16").wire == "bfloat16"
