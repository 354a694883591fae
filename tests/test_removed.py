"""What users wrote for an earlier version raises an error that says what to write now."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import dynamix
from dynamix import removed
from tests.refused import refused


@pytest.mark.parametrize("name", sorted(removed.MODULES))
def test_a_module_that_is_gone_says_what_to_write(name: str) -> None:
    refused(ImportError, r"removed in 0\.3: write ", importlib.import_module, name)


@pytest.mark.parametrize("name", ["dynamix.emulator.scenario", "dynamix.simulator.env", "dynamix.training.ppo"])
def test_a_module_in_a_package_that_moved_says_where_to(name: str) -> None:
    with pytest.raises(ImportError, match=r"removed in 0\.3: write import dynamix_lab\.\w+ \(pip install \./lab, in"):
        importlib.import_module(name)


@pytest.mark.parametrize("name", sorted(removed.NAMES))
def test_a_name_that_is_gone_says_what_to_write(name: str) -> None:
    refused(ImportError, r"removed in 0\.3: write ", getattr, dynamix, name)


def test_other_names_and_modules_are_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        dynamix.nothing_like_it  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dynamix\.nothing_like_it'"):
        importlib.import_module("dynamix.nothing_like_it")


@pytest.mark.parametrize("make", [dynamix.Controller, dynamix.Settings])
@pytest.mark.parametrize("learn", [True, False])
def test_learning_on_the_job_says_what_to_write(make: Any, learn: bool) -> None:
    refused(dynamix.ConfigError, rf"learn={learn} .*removed in 0\.3: write no learn=", make, "dynamix", 8, learn=learn)
