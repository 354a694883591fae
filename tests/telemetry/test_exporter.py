"""The example that offers figures to Prometheus, and the Grafana dashboard that asks for them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dynamix.events.records import read_events
from tests.telemetry.simulated import simulate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exporter", ROOT / "examples" / "exporter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collected(example: ModuleType, *paths: Path) -> dict[tuple[str, str], float]:
    return polled(example.Exporter(paths))


def polled(exporter: Any) -> dict[tuple[str, str], float]:
    """(name, worker or kind) -> value, of one run."""
    exporter.look()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, next((v for k, v in sample.labels.items() if k != "run"), "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_figures_are_those_of_the_newest_window(example: ModuleType, tmp_path: Path) -> None:
    events = read_events(simulate(tmp_path / "events.jsonl", windows=12))
    found = collected(example, tmp_path)
    window = events[-1]["window"]
    assert found["dynamix_samples_total", ""] == events[-1]["samples_seen"]
    assert found["dynamix_windows_total", ""] == 12
    assert found["dynamix_global_batch_samples", ""] == sum(window["batch_size"])
    for worker in range(4):
        assert found["dynamix_worker_batch_samples", str(worker)] == window["batch_size"][worker]
        assert found["dynamix_worker_compute_seconds", str(worker)] == pytest.approx(window["compute"][worker])
    each = [(c + (d or 0)) / b for c, d, b in zip(window["compute"], window["data"], window["batch_size"], strict=True)]
    scores = [found["dynamix_worker_relative_perf_score", str(worker)] for worker in range(4)]
    assert scores == pytest.approx([min(each) / one for one in each])
    assert found["dynamix_decisions_total", "new"] + found.get(("dynamix_decisions_total", "keep"), 0) == 12


def test_steps_between_windows_and_before_a_job_was_resumed_are_counted(example: ModuleType, tmp_path: Path) -> None:
    """A window measures 4 steps, and a fifth trains while its allocation is on its way: 200 of 250 were told once."""
    events = read_events(simulate(tmp_path / "all.jsonl", windows=50))
    for index, event in enumerate(events):
        event["window"] |= {"step": 5.0 * (index + 1), "steps": 4.0}
    for name, kept in (("whole", events), ("resumed", events[20:])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
        assert collected(example, tmp_path / name)["dynamix_steps_total", ""] == 250


def test_the_documents_and_the_dashboard_name_figures_that_exist(example: ModuleType, tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=12, policy="guarded:dynamix")
    exporter = example.Exporter([tmp_path])
    exporter.look()
    run = next(iter(exporter.runs.values()))
    (source,) = exporter.sources.values()
    (view,) = source.views.values()
    names = {f"dynamix_{name}{'_total' if kind is example.Counter else ''}" for kind, name, *_ in run.figures(view, 0)}
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"dynamix_\w+", expression)}
    assert asked <= names
    assert all(re.search(r'dynamix_\w+\{run=~"\$run"\}', expression) for expression in expressions)
    assert {panel["type"] for panel in dashboard["panels"]} == {"timeseries"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    told = set(re.findall(r"`(dynamix_\w+)`", (ROOT / "docs" / "report.md").read_text()))
    assert told == names


def test_it_starts_before_its_runs_and_finds_those_that_appear_later(example: ModuleType, tmp_path: Path) -> None:
    exporter = example.Exporter([tmp_path / "runs", tmp_path / "other" / "late"])
    assert polled(exporter) == {}
    known = []
    for folder in ("runs/early", "runs/late", "other/late"):
        simulate(tmp_path / folder / "events.jsonl", windows=2)
        exporter.look()
        assert list(exporter.sources.values())[:-1] == known  # those already followed stay
        known = list(exporter.sources.values())
    assert list(exporter.runs) == ["early", "late", str(tmp_path / "other" / "late" / "events.jsonl")]


def test_it_says_once_what_it_waits_for(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    begun, none = tmp_path / "begun", tmp_path / "none"
    begun.mkdir()
    (begun / "run.json").write_text("{}")
    exporter = example.Exporter([begun, none])
    exporter.look()
    exporter.look()
    waits = [f"exporter: waits for {path}" for path in (none, begun / "events.jsonl")]
    assert capsys.readouterr().err.splitlines() == waits


def test_what_needs_earlier_windows_is_left_out_of_the_first_poll(example: ModuleType, tmp_path: Path) -> None:
    compared = {"dynamix_expected_step_seconds", "dynamix_worker_individual_perf_score"}
    lines = simulate(tmp_path / "all.jsonl", windows=4).read_bytes().splitlines(keepends=True)
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines[0])
    exporter = example.Exporter([path])
    assert not compared & {name for name, _ in polled(exporter)}
    path.write_bytes(b"".join(lines))
    found = polled(exporter)
    assert compared <= {name for name, _ in found}
    assert 0 < min(found["dynamix_worker_individual_perf_score", str(worker)] for worker in range(4)) <= 1


def test_the_age_of_the_newest_window_is_that_of_the_file(example: ModuleType, tmp_path: Path) -> None:
    path = simulate(tmp_path / "events.jsonl", windows=2)
    os.utime(path, (1e9, 1e9))
    found = collected(example, path)
    assert found["dynamix_last_window_timestamp_seconds", ""] == pytest.approx(1e9, abs=0.1)


def test_every_kind_of_event_begins_at_zero(example: ModuleType, tmp_path: Path) -> None:
    found = collected(example, simulate(tmp_path / "events.jsonl", windows=2))
    kinds = {kind: value for (name, kind), value in found.items() if name == "dynamix_events_total"}
    told = "".join((ROOT / "src" / "dynamix" / "telemetry" / f"{name}.py").read_text() for name in ("notices", "run"))
    assert set(re.findall(r'\.note\([^"]*"(\w+)"', told)) == set(kinds)
    assert set(kinds.values()) == {0}


def test_every_figure_has_a_help_text_with_its_unit(example: ModuleType, tmp_path: Path) -> None:
    exporter, registry = example.Exporter([simulate(tmp_path / "events.jsonl", windows=2)]), CollectorRegistry()
    exporter.look()
    registry.register(exporter)
    helps = dict(re.findall(r"# HELP (\w+) (.+)", generate_latest(registry).decode()))
    units = {"seconds": "econds", "samples": "amples", "ratio": "0 to 1", "score": "0 to 1"}
    for name, text in helps.items():
        words = name.removeprefix("dynamix_").removesuffix("_total").replace("_", " ")
        assert text.rstrip(".").lower() != words
        assert text.endswith(".")
        assert units.get(words.split()[-1], "") in text
    assert len(helps) >= 18


def test_it_says_once_for_what_it_waits(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = example.Exporter([tmp_path / "late.jsonl"])
    for _ in range(3):
        exporter.look()
    assert capsys.readouterr().err == f"exporter: waits for {tmp_path / 'late.jsonl'}\n"
    simulate(tmp_path / "late.jsonl", windows=2)
    assert polled(exporter)
    assert capsys.readouterr().err == ""


def test_a_taken_port_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("sys.argv", ["exporter.py", str(simulate(tmp_path / "a.jsonl")), "--port", str(port)])
        with pytest.raises(
            SystemExit, match=rf"^error: cannot listen at 127.0.0.1:{port} \(.+\); choose another --port$"
        ):
            runpy.run_path(str(ROOT / "examples" / "exporter.py"), run_name="__main__")


def test_it_explains_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, code in ((["--help"], 0), ([], 2), (["--port", "1234"], 2)):
        monkeypatch.setattr("sys.argv", ["exporter.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples" / "exporter.py"), run_name="__main__")
        assert ended.value.code == code
        assert "--address" in "".join(capsys.readouterr())
