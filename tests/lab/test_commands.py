from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix_lab.commands.removed import REMOVED


def test_a_result_names_the_command_that_made_it_with_every_option() -> None:
    given = ["bench", "overhead", "--json", "--policies", "goodput", "--decision-only", "--workers", "4"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["command"].split()
    assert said[:3] == ["dynamix", "bench", "overhead"]
    assert {"--decision-only", "--policies", "goodput", "--workers", "4"} == set(said[3:])
    assert CliRunner().invoke(app, said[1:]).exit_code == 0


@pytest.mark.parametrize(
    "name",
    [
        "aggregator",
        "codec-speed",
        "compression",
        "compression-cases",
        "emulator-accuracy",
        "faults",
        "fidelity",
        "network-speed",
        "observe",
        "overhead",
        "peers",
        "quality",
        "scaling",
        "stepcount",
        "stigmergy",
        "workloads",
    ],
)
def test_every_measurement_is_a_command(name: str) -> None:
    done = CliRunner().invoke(app, ["bench", name, "--help"])
    assert done.exit_code == 0
    assert "--json" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["stepcount", "nonsense"],
        ["stepcount", "ratings", "--rule", "none"],
    ],
)
def test_an_unknown_workload_is_refused_with_one_line(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert done.output.strip().startswith("error: ")


def test_cases_are_counted_and_judged() -> None:
    done = CliRunner().invoke(app, ["bench", "compression-cases", "--count", "3", "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["cases"], found["failed"]) == (0, 3, 0)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_command_that_is_gone_says_what_to_write_now(name: str) -> None:
    for arguments in ([], ["--help"], ["--against", "HEAD~1", "--json"]):
        done = CliRunner().invoke(app, ["bench", name, *arguments])
        assert done.exit_code == 2
        assert done.output == f"error: dynamix bench {name}: removed in 0.3: write {REMOVED[name]}\n"
    assert f"│ {name} " not in CliRunner().invoke(app, ["bench", "--help"]).output
