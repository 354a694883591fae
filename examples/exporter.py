"""Offers figures of runs to Prometheus, and to the Grafana dashboard in docs. Needs `prometheus-client`.

python examples/exporter.py runs/mine      # http://127.0.0.1:9642/metrics; with --once it prints them, and ends

It follows the runs' events files. Import docs/grafana-dashboard.json. Of many workers it shows the 64 slowest.
"""

import math
import sys
import time

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from dynamix.model import JobModel
from dynamix.telemetry import find_sources

NEWEST = {"global_batch_samples": "global_batch", "noise_scale_samples": "noise_scale", "step_seconds": "step_s"}
NEWEST |= {"waiting_ratio": "waiting", "samples_per_second": "samples_per_s", "loss": "loss"}
NEWEST |= {"accuracy_ratio": "accuracy"}


class Run:
    def __init__(self):
        self.model, self.window, self.expected, self.best = JobModel(), None, math.nan, np.array(np.inf)

    def figures(self, view):
        window, changes = view.newest, view.changes.count
        if window is not self.window:  # update the model once for each new window
            known = self.model.sizes.shape == window.batch_size.shape
            self.expected = float(self.model.step_s(window.batch_size)) if known else math.nan
            self.model, self.window = self.model.update(window), window
        totals = {"samples": view.samples, "steps": view.steps, "windows": view.windows, "size_changes": changes}
        yield from ((Counter, name, [], {"": value}) for name, value in totals.items())
        yield Counter, "decisions", ["decision"], view.decisions
        yield Counter, "events", ["kind"], view.notices.counts
        if window is None:  # a run that ended before its first whole window
            return
        gauges = {name: view.latest[key] for name, key in NEWEST.items()} | {"expected_step_seconds": self.expected}
        yield from ((Gauge, name, [], {"": value}) for name, value in gauges.items())
        each = np.asarray(window.seconds_per_sample)
        self.best = np.fmin(self.best, each) if self.best.shape in ((), each.shape) else each
        of = {"batch_samples": window.batch_size, "relative_perf_score": np.fmin.reduce(each) / each}
        of |= {f"{part}_seconds": values for part, values in view.newest_parts().items()}
        slowest = np.argsort(-np.nan_to_num(each))[:64]
        for name, values in (of | {"individual_perf_score": self.best / each}).items():
            yield Gauge, f"worker_{name}", ["worker"], {str(worker): values[worker] for worker in slowest}


class Exporter:
    def __init__(self, paths):
        self.sources, self.runs, self.told = find_sources(paths), {}, []

    def collect(self):
        return self.told

    def look(self):
        metrics = {}
        for source in self.sources:
            source.refresh()
            for view in source.views.values():
                for kind, name, label, values in self.runs.setdefault(view.name, Run()).figures(view):
                    new = kind(f"dynamix_{name}", name.replace("_", " "), labels=["run", *label])
                    for key, value in values.items():
                        if math.isfinite(value):
                            metrics.setdefault(name, new).add_metric([view.name, *([key] if label else [])], value)
        self.told = list(metrics.values())


if __name__ == "__main__":
    exporter, registry = Exporter([path for path in sys.argv[1:] if path != "--once"]), CollectorRegistry()
    registry.register(exporter)
    exporter.look()
    if "--once" in sys.argv:
        print(generate_latest(registry).decode())
    else:
        start_http_server(9642, "127.0.0.1", registry=registry)
        while not time.sleep(5):
            exporter.look()
