"""What `dynamix policy explain` says is what the policy does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.policies.learned.policy import INPUTS, LearnedPolicy, ResidualNet
from dynamix.telemetry.explained import MOST, explained_html
from dynamix_lab.training.explaining import explain_policy

SIZE: dict[str, Any] = {"workers": 4, "clusters": 4, "windows": 5}


def test_an_untrained_policy_is_the_rule_and_no_feature_moves_it() -> None:
    found = explain_policy(LearnedPolicy(), **SIZE)
    assert found["differs"]["same"] == 1.0
    assert found["differs"]["moved"] == [0.0] * 5
    assert [feature["name"] for feature in found["features"]] == list(INPUTS)
    assert all(feature["shares"] == feature["total"] == 0 for feature in found["features"])
    assert all(feature["size"] == [1.0] * 5 for feature in found["features"])


def test_the_feature_that_moves_a_policy_is_named_first_and_with_its_direction() -> None:
    """Of a net that reads one feature of each worker: the more it waits, the more it gets."""
    net = ResidualNet(hidden=4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.encode[0].weight[0, INPUTS.index("wait_fraction")] = 1.0
        net.encode[2].weight[0, 0] = 1.0
        net.own.weight[0, 0] = 1.0
        net.local[1].weight[0, 0] = 1.0
    found = explain_policy(LearnedPolicy(net), **SIZE)
    first = found["features"][0]
    assert first["name"] == "wait_fraction"
    assert first["size"] == sorted(first["size"])
    assert first["size"][-1] > first["size"][0]
    assert all(feature["shares"] == 0 for feature in found["features"][1:])


def test_the_command_prints_it_and_refuses_rules() -> None:
    command = ["policy", "explain", "--workers", "4", "--clusters", "2", "--windows", "3"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "wait_fraction" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["command"] == "policy explain"
    assert len(found["features"]) == len(INPUTS)
    refused = CliRunner().invoke(app, [*command[:2], "goodput"])
    assert refused.exit_code == 2
    assert "residual kind" in refused.stderr


def test_the_page_holds_every_feature_and_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "explained.html"
    command = ["policy", "explain", "--workers", "4", "--clusters", "2", "--windows", "3", "--out", str(page)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "wait_fraction" in text
    assert text.count('<svg class="curve"') == MOST
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in text
    refused = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "none" / "page.html")])
    assert refused.exit_code == 2
    assert "out" in refused.stderr


def test_a_name_is_text_on_the_page() -> None:
    found = explain_policy(LearnedPolicy(), **SIZE)
    assert "<b>" not in explained_html("<b>mine</b>", found)


def test_rules_have_nothing_to_explain() -> None:
    with pytest.raises(ConfigError, match="residual kind"):
        explain_policy(make_policy("goodput"))  # type: ignore[arg-type]
