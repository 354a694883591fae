"""`dynamix emulate --compare`: one script under several policies, without editing it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix_lab.emulator.compare import ComparedRow, rows_of
from tests.refused import refused

# What a script under comparison does, without its minutes of training.
SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
policy, meet = os.environ["DYNAMIX_POLICY"], os.environ.get("DYNAMIX_MEET")
if meet:
    sys.exit("dynamix.errors.UsageError: call it at a meeting: `if controller.met:`")
if policy == "lb_bsp":
    sys.exit("no such data")
if os.environ["RANK"] == "0":
    from tests.telemetry.simulated import simulate
    from pathlib import Path
    simulate(Path(os.environ["DYNAMIX_EVENTS"]), workers=2, windows=12, policy=policy)
"""
ROOT = str(Path(__file__).parents[3])
TWO = {"hosts": [{"cpu": 0.9}, {"cpu": 0.9}]}


def test_rows_are_policies_and_local() -> None:
    assert rows_of("static, local") == [ComparedRow("static", "static"), ComparedRow("local", "lb_bsp", "parameters")]
    assert rows_of("static:256")[0].environment == {"DYNAMIX_POLICY": "static:256"}
    rungs = [row.environment for row in rows_of("lb_bsp, goodput:adaptive, dynamix:auto, my.py:Mine:adaptive:auto")]
    adaptive, auto = {"DYNAMIX_GLOBAL_BATCH": "adaptive"}, {"DYNAMIX_MEET": "auto"}
    assert rungs[:2] == [{"DYNAMIX_POLICY": "lb_bsp"}, {"DYNAMIX_POLICY": "goodput", **adaptive}]
    assert rungs[2:] == [{"DYNAMIX_POLICY": "dynamix", **auto}, {"DYNAMIX_POLICY": "my.py:Mine", **auto, **adaptive}]
    for text in ("", " , ", "static,static", "static:1,static/1"):
        refused(ConfigError, "compare", rows_of, text)


def test_each_row_has_a_folder_and_the_whole_a_table_and_a_page(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=ROOT))
    (tmp_path / "two.yaml").write_text(json.dumps(TWO))
    command = ["emulate", str(tmp_path / "two.yaml"), "--compare", "static,local,goodput,lb_bsp"]
    command += ["--mechanism", "duty-cycle", "--throttle-after", "0", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*command, "--", sys.executable, str(script)])
    assert done.exit_code == 1, done.output
    assert "local: not available: the loop has to" in " ".join(done.stdout.split())
    assert "goodput" in done.stdout
    assert "lb_bsp: it ended with exit code 1" in done.stdout
    assert (tmp_path / "run/report.html").exists()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert [found["available"] is True for found in result["rows"].values()] == [True, False, True, True]
    assert json.loads((tmp_path / "run/static/run.json").read_text())["policy"] == "static"
    again = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--json"])
    compared = json.loads(again.stdout)["comparison"]
    assert [row["name"] for row in compared["rows"]] == ["static", "goodput"]
    assert next(row["name"] for row in compared["absent"]) == "local"


def test_a_script_that_fails_at_once_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('no such data')\n")
    (tmp_path / "two.yaml").write_text(json.dumps(TWO))
    command = ["emulate", str(tmp_path / "two.yaml"), "--compare", "static,goodput", "--mechanism", "duty-cycle"]
    command += ["--throttle-after", "0", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*command, "--", sys.executable, str(tmp_path / "script.py")])
    assert done.exit_code == 1, done.output
    assert "goodput: not run: under static the script failed before its first window" in done.stdout


def test_a_wrong_policy_is_said_before_anything_runs(tmp_path: Path) -> None:
    command = ["emulate", "demo", "--compare", "no-such-policy", "--out", str(tmp_path / "run"), "--", "true"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "no-such-policy" in done.stderr
    assert not (tmp_path / "run").exists()


# Each row finds out where it may write, and whether another row has written there.
WRITES = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
place = Path(sys.argv[1].removeprefix("--checkpoints="))
assert place == Path(os.environ["DYNAMIX_ROW"]) and place.is_dir(), place
if os.environ["RANK"] == "0":
    from tests.telemetry.simulated import simulate
    begun = int((place / "checkpoint").exists() or Path("shared").exists())
    (place / "checkpoint").write_text("")
    if len(sys.argv) > 2:
        Path("shared").write_text("")
    more = {{"began_at": 1_000}} if begun else {{"began_at": 0}}
    simulate(Path(os.environ["DYNAMIX_EVENTS"]), workers=2, windows=12, policy="static", **more)
"""


@pytest.mark.parametrize("shares", [False, True])
def test_a_script_may_write_to_its_rows_folder_and_a_row_that_begins_elsewhere_is_named(
    tmp_path: Path, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(WRITES.format(root=ROOT))
    Path("two.yaml").write_text(json.dumps(TWO))
    command = ["emulate", "two.yaml", "--compare", "static,static:64", "--mechanism", "duty-cycle"]
    command += ["--throttle-after", "0", "--out", "run", "--", sys.executable, "script.py", "--checkpoints={row}"]
    done = CliRunner().invoke(app, [*command, *(["shared"] if shares else [])])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert ("No verdict for static:64: it began at sample 1,000, static at sample 0" in said) is shares
    assert ("static:64 took, as parts of static's time, 1.00" in said) is not shares
    assert sorted(path.parent.name for path in Path("run").glob("*/checkpoint")) == ["static", "static-64"]
    job = json.loads(Path("run/static-64/run.json").read_text())["job"]
    assert job[2] == f"--checkpoints={tmp_path / 'run/static-64'}"
