"""Figures of runs for Prometheus, by a process of its own that reads events files. It needs the extra `exporter`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dynamix.errors import ConfigError
from dynamix.telemetry.run import RunView
from dynamix.telemetry.sources import RunSource
from dynamix.window import Floats

COUNTERS = {
    "dynamix_samples": "Samples used by all workers.",
    "dynamix_steps": "Optimizer steps in closed windows.",
    "dynamix_windows": "Windows that were closed.",
    "dynamix_size_changes": "Windows whose batch sizes differ from those of the window before.",
}
GAUGES = {  # name -> key of a view's newest numbers, what it is
    "dynamix_global_batch_samples": ("global_batch", "Samples of a round, all workers."),
    "dynamix_noise_scale_samples": ("noise_scale", "Noise scale: up to about there a larger global batch pays."),
    "dynamix_step_seconds": ("step_s", "Seconds of a round, newest window."),
    "dynamix_expected_step_seconds": ("expected_s", "Seconds of a round that the job model expected of it."),
    "dynamix_waiting_ratio": ("waiting", "Part of the time that workers waited for slower ones, 0 to 1."),
    "dynamix_samples_per_second": ("samples_per_s", "Samples a second, all workers, newest window."),
    "dynamix_loss": ("loss", "Training loss, mean of all workers' batches."),
    "dynamix_accuracy_ratio": ("accuracy", "Training accuracy, 0 to 1."),
}
PER_WORKER = {
    "dynamix_worker_batch_samples": "Samples of a round, of this worker.",
    "dynamix_worker_compute_seconds": "Seconds of computing in a round.",
    "dynamix_worker_data_seconds": "Seconds of a round that it waited for data.",
    "dynamix_worker_network_seconds": "Seconds of exchanging in a round.",
    "dynamix_worker_wait_seconds": "Seconds of a round that it waited for slower workers.",
    "dynamix_worker_relative_perf_score": "The fastest worker's time for a sample over its own: 1 is the fastest.",
    "dynamix_worker_individual_perf_score": "Its own best time for a sample over that of the newest window.",
}
LABELLED = {
    "dynamix_decisions": ("decision", "Decisions: new, keep, late, failed."),
    "dynamix_events": ("kind", "What the report lists as events: guard, fault, restart and others."),
}


class RunCollector:
    """What Prometheus asks for, made of the newest window of each run. `refresh` reads the files.

    Scores of workers are per sample, so a job with balanced sizes does not hide its slow worker. Their names are those
    of nvidia-resiliency-ext.

    most_workers   above it only the slowest have figures of their own
    """

    def __init__(self, sources: Sequence[RunSource], *, most_workers: int = 64) -> None:
        self.sources, self.most_workers = list(sources), most_workers
        self._lock = threading.Lock()
        self._best: dict[str, Floats] = {}  # run -> (W,) least seconds of a sample so far

    def refresh(self) -> None:
        """Take in what was written since."""
        with self._lock:
            for source in self.sources:
                source.refresh()

    def collect(self) -> Iterator[Metric]:
        """All figures, as `prometheus_client` asks for them."""
        with self._lock:
            views = [view for source in self.sources for view in source.views.values() if view.newest is not None]
            yield from self._of_jobs(views)
            yield from self._of_workers(views)

    def _of_jobs(self, views: Sequence[RunView]) -> Iterator[Metric]:
        for name, about in COUNTERS.items():
            counter = CounterMetricFamily(name, about, labels=["run"])
            for view in views:
                counter.add_metric([view.name], _counted(view)[name])
            yield counter
        for name, (key, about) in GAUGES.items():
            gauge = GaugeMetricFamily(name, about, labels=["run"])
            for view in views:
                if math.isfinite(value := view.latest.get(key, math.nan)):
                    gauge.add_metric([view.name], value)
            yield gauge
        for name, (label, about) in LABELLED.items():
            counter = CounterMetricFamily(name, about, labels=["run", label])
            for view in views:
                counts = view.decisions if label == "decision" else view.notices.counts
                for kind, count in counts.items():
                    counter.add_metric([view.name, kind], count)
            yield counter

    def _of_workers(self, views: Sequence[RunView]) -> Iterator[Metric]:
        figures = [(view, self._figures(view)) for view in views]
        for name, about in PER_WORKER.items():
            gauge = GaugeMetricFamily(name, about, labels=["run", "worker"])
            for view, found in figures:
                score = found["dynamix_worker_relative_perf_score"]
                order = np.argsort(np.where(np.isfinite(score), score, np.inf), kind="stable")
                for worker in np.sort(order[: self.most_workers]).tolist():
                    if math.isfinite(value := float(found[name][worker])):
                        gauge.add_metric([view.name, str(worker)], value)
            yield gauge

    def _figures(self, view: RunView) -> dict[str, Any]:
        assert view.newest is not None
        window = view.newest
        each = np.asarray(window.seconds_per_sample, dtype=np.float64)
        best = self._best.get(view.name)
        best = each if best is None or best.shape != each.shape else np.fmin(best, each)
        self._best[view.name] = best
        fastest = np.nanmin(each) if np.isfinite(each).any() else math.nan
        parts = {f"dynamix_worker_{name}_seconds": values for name, values in view.newest_parts().items()}
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = {
                "dynamix_worker_relative_perf_score": fastest / each,
                "dynamix_worker_individual_perf_score": best / each,
            }
        return {"dynamix_worker_batch_samples": window.batch_size, **parts, **scores}


def serve_metrics(
    collector: RunCollector, *, port: int = 9642, every_s: float = 5.0, tell: Callable[[str], None] = print
) -> None:
    """Serve on loopback until interrupted. Raises `ConfigError` where the port is taken."""
    registry = CollectorRegistry(auto_describe=False)
    collector.refresh()
    registry.register(collector)  # type: ignore[arg-type,unused-ignore]
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError("port", port, "a free port of 127.0.0.1", "choose another, or 0 for any") from error
    try:
        tell(f"exporter: http://127.0.0.1:{server.server_port}/metrics (Ctrl-C ends it)")
        while True:
            time.sleep(every_s)
            collector.refresh()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)


def _counted(view: RunView) -> dict[str, float]:
    return {
        "dynamix_samples": view.samples,
        "dynamix_steps": view.steps,
        "dynamix_windows": float(view.windows),
        "dynamix_size_changes": float(view.foresight.count),
    }
