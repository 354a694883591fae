"""A researcher's own class runs wherever a command takes a policy's name."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_policy.py"
OWN = """
from dynamix.policies.proportional import LBBSP

class Own(LBBSP):
    pass
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_rule.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rule", raising=False)


def result_of(*arguments):
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_policy_evaluate_scores_it_as_the_rule_that_it_is():
    small = ["--families", "pai-steady", "--workers", "2", "--rows", "8", "--windows", "6", "--no-hedged"]
    cell = result_of("policy", "evaluate", "own_rule:Own", *small)["cells"]["pai-steady-2"]
    assert cell["own_rule:Own"]["geometric_mean"] == cell["lb_bsp"]["geometric_mean"]


def test_the_example_is_scored_and_shown_by_the_name_that_was_given():
    name = f"{EXAMPLE}:FollowNoise"
    small = ["--families", "pai-steady", "--workers", "3", "--rows", "12", "--windows", "4", "--no-hedged"]
    assert name in result_of("policy", "evaluate", name, *small)["summary"]
    about = result_of("policy", "show", name)
    assert (about["class"], about["description"][:12]) == (name, "Every worker")


@pytest.mark.parametrize("module", ["my_worlds", "my_worlds.py"])
def test_families_of_ones_own_score_a_policy(module, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "design" / "simulator.md"
    (world,) = (block for block in page.read_text().split("```python\n")[1:] if "WORLDS" in block)
    (tmp_path / "my_worlds.py").write_text(world.split("```")[0])
    small = ["--workers", "4", "--rows", "16", "--windows", "6", "--no-hedged", "--families"]
    cell = result_of("policy", "evaluate", "own_rule:Own", *small, f"{module}:slow-links")["cells"]
    scores = cell[f"{module}:slow-links-4"]
    assert scores["own_rule:Own"]["geometric_mean"] == scores["lb_bsp"]["geometric_mean"]
    for wrong, said in ((f"{module}:fast", "slow-links"), ("no_module:x", "working directory"), ("no.py:x", "no.py")):
        done = CliRunner().invoke(app, ["policy", "evaluate", "static", *small, wrong])
        assert done.exit_code == 2
        assert said in done.stderr


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.slow
def test_the_demo_runs_it_without_root_in_place_of_dynamix_and_says_so():
    options = ["--quick", "--rows", "balance", "--mechanism", "duty-cycle", "--out", "run"]
    result = result_of("demo", *options, "--policy", "guarded:own_rule.py:Own")
    hashed = {"name": "guarded:own_rule.py:Own", "sha256": hashlib.sha256(OWN.encode()).hexdigest()}
    assert result["policy_files"] == {"guarded:own_rule.py:Own": hashed}
    assert result["cases"][0]["rows"]["balance"]["steps"][0] > 0
    assert result["mechanisms"]["network"] == "loopback"
    assert "guarded:own_rule.py:Own" in Path("run/report.html").read_text()
