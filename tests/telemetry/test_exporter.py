"""The example that offers figures to Prometheus, and the Grafana dashboard that asks for them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

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
    """(name, worker or kind) -> value."""
    exporter = example.Exporter(paths)
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
    (view,) = exporter.sources[0].views.values()
    names = {f"dynamix_{name}{'_total' if kind is example.Counter else ''}" for kind, name, *_ in run.figures(view)}
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"dynamix_\w+", target["expr"])
    }
    assert asked <= names
    assert {panel["type"] for panel in dashboard["panels"]} == {"timeseries"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    told = set(re.findall(r"`(dynamix_\w+)`", (ROOT / "docs" / "report.md").read_text()))
    assert told == names
