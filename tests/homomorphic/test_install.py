"""What this distribution adds to the product, and that states of 0.2 load."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from torch import nn

import dynamix_homomorphic
from dynamix.compression import CompressionState
from dynamix_homomorphic import LossyState
from tests.ranks import run_ranks


def test_it_is_found_by_its_entry_points() -> None:
    (ways,) = (entry for entry in entry_points(group="dynamix.compression") if entry.name == "homomorphic")
    assert ways.value == "dynamix_homomorphic.ways:register"
    (command,) = (entry for entry in entry_points(group="dynamix.commands") if entry.name == "aggregator")
    assert callable(command.load())


def test_its_names_are_there_and_the_command_needs_no_torch() -> None:
    assert all(getattr(dynamix_homomorphic, name) for name in dynamix_homomorphic.__all__)
    code = "import sys, dynamix_homomorphic.commands\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _loads(rank: int) -> list[str]:
    for mode in ("auto", "compaction", "lhc"):
        CompressionState(mode).load_state_dict({"settings": [mode, 0]})
    lossy = LossyState(nn.Linear(2, 1), keep=0.5, hook_state=CompressionState("compaction"))
    lossy.load_state_dict({"memory": {"weight": torch.ones(2)}, "inner": {"settings": ["compaction", 0]}})
    return sorted(lossy.state_dict()["memory"])


@pytest.mark.multiproc
def test_states_of_0_2_load() -> None:
    assert run_ranks(_loads, 1) == [["weight"]]
