"""What adopting costs, counted in the diffs of the docs; what adapters refuse."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import dynamix
from dynamix.errors import ConfigError

ROOT = Path(__file__).parents[2]
MOST = {"torchrun": 7, "Lightning": 3, "Transformers": 3, "Accelerate": 3}


def diffs() -> dict[str, list[str]]:
    """The added lines of each diff in the docs, by the word that its introduction has."""
    page = (ROOT / "docs/frameworks.md").read_text()
    found = re.findall(r"([^\n]+):\n\n```diff\n(.*?)```", page, re.DOTALL)
    by_name = {next(name for name in MOST if name in title): text for title, text in found}
    return {name: [line[1:].strip() for line in text.split("\n") if line[:1] == "+"] for name, text in by_name.items()}


def test_adopting_takes_few_lines() -> None:
    counted = {name: len(lines) for name, lines in diffs().items()}
    assert counted.keys() == MOST.keys()
    assert all(counted[name] <= most for name, most in MOST.items()), counted


def test_the_examples_have_the_lines_of_the_docs() -> None:
    scripts = {"Lightning": "lightning_trainer", "Transformers": "transformers_trainer"}
    for name, script in (scripts | {"Accelerate": "accelerate_loop"}).items():
        text = (ROOT / f"examples/{script}.py").read_text()
        assert all(line in text or "Trainer(strategy" in line for line in diffs()[name]), name


@pytest.mark.parametrize(
    ("options", "outside"), [({"micro_batch": 4}, ""), ({"meet": "parameters"}, ""), ({}, "parameters")]
)
def test_what_gives_ranks_unlike_numbers_of_batches_is_refused(
    options: dict[str, object], outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the script says it or the environment."""
    from dynamix.integrations.lightning import BalanceCallback

    if outside:
        monkeypatch.setenv("DYNAMIX_MEET", outside)
    with pytest.raises(ConfigError, match="Accelerate or Fabric"):
        BalanceCallback(dynamix.Settings("lb_bsp", **options))


def test_settings_say_which_argument_is_wrong() -> None:
    with pytest.raises(ConfigError, match="intervall"):
        dynamix.Settings("lb_bsp", intervall=5)
    with pytest.raises(ConfigError, match="leave batch_size out"):
        dynamix.Settings("lb_bsp", batch_size=16).bind(batch_size=32)


def test_settings_travel_to_other_processes() -> None:
    settings = pickle.loads(pickle.dumps(dynamix.Settings("static", interval=7)))
    controller = settings.bind(batch_size=8)
    assert (controller.interval, controller.batch_sizes.tolist()) == (7, [8])
    controller.close()
