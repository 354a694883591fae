"""What adopting costs, counted in the diffs of the docs; how long adapters are; what they refuse."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import dynamix
from dynamix.errors import ConfigError
from dynamix.integrations import ADAPTERS

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


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_at_most_40_lines(name: str) -> None:
    """Without docstrings, imports and blank lines."""
    text = (ROOT / f"src/dynamix/integrations/{name}.py").read_text()
    told = set[int]()
    for node in ast.walk(ast.parse(text)):
        has = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        first = [node.body[0]] if has and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        for part in [*first, *([node] if isinstance(node, ast.Import | ast.ImportFrom) else [])]:
            told |= set(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    lines = [line for i, line in enumerate(text.split("\n"), 1) if line.strip() and i not in told]
    assert len(lines) <= 40, len(lines)


@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"meet": "parameters"}])
def test_what_gives_ranks_unlike_numbers_of_batches_is_refused(options: dict[str, object]) -> None:
    from dynamix.integrations.lightning import BalanceCallback

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


def test_a_way_of_meeting_that_is_said_from_outside_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamix.integrations.lightning import BalanceCallback

    monkeypatch.setenv("DYNAMIX_MEET", "parameters")
    with pytest.raises(ConfigError, match="Accelerate or Fabric"):
        BalanceCallback(dynamix.Settings("lb_bsp"))
