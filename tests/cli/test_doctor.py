"""`dynamix doctor`: what the machine offers, and how to enable what is missing."""

import json

import pytest
from typer.testing import CliRunner

from dynamix.cli import doctor
from dynamix.cli.app import app


def call(*arguments, columns=100):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def test_doctor_says_what_is_there_as_json():
    found = json.loads(call("doctor", "--json").stdout)
    assert {e["name"] for e in found["areas"]["probes"]} >= {"timing", "host", "network"}
    assert all(e["detail"] for entries in found["areas"].values() for e in entries)
    page = call("doctor")
    assert page.exit_code == 0
    assert page.stdout.startswith("Works here: probes: timing, host, ")


def test_the_page_prints_how_to_install_an_extra_as_it_must_be_typed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    page = " ".join(call("doctor", columns=300).stdout.split())
    for extra in ("compression", "gpu"):
        assert f"pip install '.[{extra}]' (in dynamix's source tree)" in page
    assert "pip install ./lab (in dynamix's source tree)" in page


def test_what_the_laboratory_offers_is_told_by_the_laboratory():
    areas = json.loads(call("doctor", "--json").stdout)["areas"]
    assert {"network", "cpu", "duty-cycle"} <= {entry["name"] for entry in areas["emulation"]}
    assert [entry["name"] for entry in areas["laboratory"]] == ["emulate", "bench"]
