"""Figures for Prometheus, and the Grafana dashboard that asks for them."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dynamix.events.records import read_events
from dynamix.telemetry import find_sources
from dynamix.telemetry.exporter import COUNTERS, GAUGES, LABELLED, PER_WORKER, RunCollector, serve_metrics
from tests.telemetry.simulated import simulate

NAMES = {*GAUGES, *PER_WORKER, *(f"{name}_total" for name in (*COUNTERS, *LABELLED))}
DOCS = Path(__file__).parents[2] / "docs"


def collected(*paths: Path, most_workers: int = 64) -> dict[tuple[str, str], float]:
    """(name, worker or kind) -> value."""
    collector = RunCollector(find_sources(paths), most_workers=most_workers)
    collector.refresh()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)  # type: ignore[arg-type,unused-ignore]
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, next((v for k, v in sample.labels.items() if k != "run"), "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_figures_are_those_of_the_newest_window(tmp_path: Path) -> None:
    events = read_events(simulate(tmp_path / "events.jsonl", windows=12))
    found = collected(tmp_path)
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


def test_of_many_workers_only_the_slowest_are_told(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", workers=70, windows=2)
    found = collected(tmp_path, most_workers=5)
    assert sum(name == "dynamix_worker_batch_samples" for name, _ in found) == 5


def test_the_documents_and_the_dashboard_name_figures_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"dynamix_\w+", target["expr"])
    }
    assert asked <= NAMES
    assert {panel["type"] for panel in dashboard["panels"]} == {"timeseries"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    told = set(re.findall(r"`(dynamix_\w+)`", (DOCS / "report.md").read_text()))
    assert told == NAMES


def test_it_is_served_on_loopback(tmp_path: Path) -> None:
    simulate(tmp_path / "events.jsonl", windows=2)
    told: list[str] = []
    ready = threading.Event()

    class Enough(Exception):
        pass

    def tell(text: str) -> None:
        told.append(text)
        address = re.findall(r"http://127\.0\.0\.1:\d+/metrics", text)[0]
        with urllib.request.urlopen(address, timeout=20) as answer:
            told.append(answer.read().decode())
        ready.set()
        raise Enough

    with pytest.raises(Enough):
        serve_metrics(RunCollector(find_sources([tmp_path])), port=0, tell=tell)
    assert 'dynamix_windows_total{run="' in told[1]
