"""Offers figures of runs to Prometheus, and to the Grafana dashboard in docs. Needs `prometheus-client`.

python examples/exporter.py runs/mine      # http://127.0.0.1:9642/metrics; with --once it prints them, and ends

It follows the runs' events files, and finds those that appear later. Import docs/grafana-dashboard.json. Of many
workers it shows the 64 slowest.
"""

import argparse
import math
import sys
import time

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from dynamix.errors import ConfigError
from dynamix.model import JobModel
from dynamix.telemetry import find_sources

NEWEST = {"global_batch_samples": "global_batch", "noise_scale_samples": "noise_scale", "step_seconds": "step_s"}
NEWEST |= {"waiting_ratio": "waiting", "samples_per_second": "samples_per_s", "loss": "loss"}
NEWEST |= {"accuracy_ratio": "accuracy"}
# These begin at 0: Prometheus sees no increase in the first value of a series.
KINDS = ("restart", "workers", "pause", "late", "failed", "fault", "guard", "meeting", "dropped")
HELP = {
    "samples": "Samples that the job has trained on, those before a resume included.",
    "steps": "Optimizer steps of the job, those before a resume included.",
    "windows": "Windows written to the events file.",
    "size_changes": "Windows whose batch sizes differ from those of the window before.",
    "decisions": "Decisions of the policy, by what came of them.",
    "events": "What happened besides decisions, by kind.",
    "global_batch_samples": "Samples of a round, summed over workers.",
    "noise_scale_samples": "Gradient noise scale, in samples.",
    "step_seconds": "Seconds of a round, as measured.",
    "expected_step_seconds": "Seconds of a round, as the job model of the poll before predicts them.",
    "waiting_ratio": "Part of the time that workers waited for slower ones, 0 to 1.",
    "samples_per_second": "Samples a second, summed over workers.",
    "loss": "Training loss, the mean over samples.",
    "accuracy_ratio": "Training accuracy, 0 to 1.",
    "last_window_timestamp_seconds": "When the newest window was written, in seconds since 1970.",
    "worker_batch_samples": "Samples of this worker in a round.",
    "worker_compute_seconds": "Seconds of a round in which this worker computed.",
    "worker_data_seconds": "Seconds of a round before this worker's forward pass, such as loading.",
    "worker_network_seconds": "Seconds of a round in which this worker exchanged gradients.",
    "worker_wait_seconds": "Seconds of a round in which this worker waited for slower ones.",
    "worker_relative_perf_score": "The fastest worker's time for a sample over this worker's, 0 to 1.",
    "worker_individual_perf_score": "This worker's best time for a sample over its newest, 0 to 1.",
}


class Run:
    def __init__(self):
        self.model, self.window, self.written_s = JobModel(), None, math.nan
        self.best, self.score, self.expected = np.array(np.nan), np.array(np.nan), math.nan

    def take(self, window, written_s):  # expected and score compare it with the windows of earlier polls
        known = self.model.sizes.shape == window.batch_size.shape
        self.expected = float(self.model.step_s(window.batch_size)) if known else math.nan
        self.model, self.window, self.written_s = self.model.update(window), window, written_s
        each = np.asarray(window.seconds_per_sample)
        best = self.best if self.best.shape == each.shape else np.full(each.shape, np.nan)
        self.best, self.score = np.fmin(best, each), np.minimum(best, each) / each

    def figures(self, view, written_s):
        window, changes = view.newest, view.changes.count
        totals = {"samples": view.samples, "steps": view.steps, "windows": view.windows, "size_changes": changes}
        yield from ((Counter, name, [], {"": value}) for name, value in totals.items())
        yield Counter, "decisions", ["decision"], view.decisions
        yield Counter, "events", ["kind"], dict.fromkeys(KINDS, 0) | view.notices.counts
        if window is None:  # a run that ended before its first whole window
            return
        if window is not self.window:
            self.take(window, written_s)
        gauges = {name: view.latest[key] for name, key in NEWEST.items()} | {"expected_step_seconds": self.expected}
        gauges["last_window_timestamp_seconds"] = self.written_s
        yield from ((Gauge, name, [], {"": value}) for name, value in gauges.items())
        each = np.asarray(window.seconds_per_sample)
        of = {"batch_samples": window.batch_size, "relative_perf_score": np.fmin.reduce(each) / each}
        of |= {f"{part}_seconds": values for part, values in view.newest_parts().items()}
        slowest = np.argsort(-np.nan_to_num(each))[:64]
        for name, values in (of | {"individual_perf_score": self.score}).items():
            yield Gauge, f"worker_{name}", ["worker"], {str(worker): values[worker] for worker in slowest}


class Exporter:
    def __init__(self, paths):
        self.paths, self.sources, self.runs, self.told = paths, {}, {}, []
        self.waits = set()

    def collect(self):
        return self.told

    def wait(self, path):
        if path not in self.waits:
            print(f"exporter: waits for {path}", file=sys.stderr)
        self.waits.add(path)

    def look(self):
        for path in self.paths:
            try:
                found = find_sources([path])
            except ConfigError:  # nothing is there yet
                self.wait(path)
                continue
            for source in found:
                if source.name in [known.name for known in self.sources.values()]:
                    source.name = str(source.events)
                self.sources.setdefault(source.events, source)
        metrics = {}
        for source in self.sources.values():
            source.refresh()
            if not source.views and not source.absent:
                self.wait(source.events)
            for view in source.views.values():
                run = self.runs.setdefault(view.name, Run())
                for kind, name, label, values in run.figures(view, time.time() - source.quiet_s):
                    new = kind(f"dynamix_{name}", HELP[name], labels=["run", *label])
                    for key, value in values.items():
                        if math.isfinite(value):
                            metrics.setdefault(name, new).add_metric([view.name, *([key] if label else [])], value)
        self.told = list(metrics.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Offers figures of runs to Prometheus.")
    parser.add_argument("runs", nargs="+", help="run folders or events files; they may appear later")
    parser.add_argument("--once", action="store_true", help="print the figures, and end")
    parser.add_argument("--port", type=int, default=9642)
    parser.add_argument("--address", default="127.0.0.1")
    args = parser.parse_args()
    exporter, registry = Exporter(args.runs), CollectorRegistry()
    registry.register(exporter)
    exporter.look()
    if args.once:
        print(generate_latest(registry).decode())
    else:
        try:
            start_http_server(args.port, args.address, registry=registry)
        except OSError as error:
            sys.exit(f"error: cannot listen at {args.address}:{args.port} ({error.strerror}); choose another --port")
        while not time.sleep(5):
            exporter.look()
