"""Serves monitoring of an aggregator: /healthz and /metrics in Prometheus' text format, on a port of loopback.

It needs no client library, so a host that only aggregates needs no extra for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.server import AggregatorServer

LATE_S = 5.0  # if it has not looked for workers for so long, it is not healthy
REQUEST_S = 5.0  # time limit of one request
GAUGES = {
    "dynamix_aggregator_jobs": "Jobs, by state: running, or gathering their workers.",
    "dynamix_aggregator_workers": "Workers of running jobs.",
    "dynamix_aggregator_handshakes": "Connections that have not said yet who they are.",
    "dynamix_aggregator_held_bytes": "Memory for the chunks of running jobs.",
    "dynamix_aggregator_job_peak_bytes": "Most memory for chunks that a job has taken so far.",
    "dynamix_aggregator_memory_limit_bytes": "Memory for chunks that all jobs may take.",
    "dynamix_aggregator_uptime_seconds": "Seconds since the figures were first offered.",
}
COUNTERS = {
    "dynamix_aggregator_jobs_done_total": "Jobs whose workers left between rounds.",
    "dynamix_aggregator_jobs_failed_total": "Jobs that ended otherwise, by kind of failure.",
    "dynamix_aggregator_refused_total": "Connections that were not let in, by kind of reason.",
    "dynamix_aggregator_rounds_total": "Buffers whose sum or union went back to all workers.",
    "dynamix_aggregator_received_bytes_total": "Bytes of buffers received from workers.",
    "dynamix_aggregator_processor_seconds_total": "Processor seconds of the process.",
}
ABOUT = {**GAUGES, **COUNTERS}
_NAMES = {"workers": "workers", "handshakes": "handshakes", "held_bytes": "held_bytes", "peak_bytes": "job_peak_bytes"}


class MetricsServer:
    """Serves the statistics of `server` while it is open. A context manager.

    port   on 127.0.0.1; 0 takes a free one, see `url`. Raises `ConfigError` if it is taken
    """

    def __init__(self, server: AggregatorServer, port: int) -> None:
        began = time.monotonic()

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    text = exposition(server.statistics(), server.limits.memory_bytes, time.monotonic() - began)
                    self._say(200, text, "text/plain; version=0.0.4; charset=utf-8")
                elif path == "/healthz":
                    late_s = time.monotonic() - server.beat_s
                    state = {"healthy": late_s < LATE_S, "seconds_since_beat": round(late_s, 3)}
                    self._say(200 if state["healthy"] else 503, json.dumps(state) + "\n", "application/json")
                else:
                    self._say(404, "/healthz and /metrics are here\n", "text/plain; charset=utf-8")

            def _say(self, status: int, text: str, kind: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: a monitor asks every few seconds."""

        try:
            self._http = _Quiet(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "metrics_port", port, "a free port of 127.0.0.1", "choose another, or 0 for any"
            ) from error
        self._thread = threading.Thread(target=self._http.serve_forever, name="dynamix-metrics", daemon=True)

    @property
    def url(self) -> str:
        """The address of the metrics."""
        return f"http://127.0.0.1:{self._http.server_port}/metrics"

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(REQUEST_S)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore: a monitor that disconnects is no error."""


def exposition(statistics: Mapping[str, Any], memory_limit_bytes: int, uptime_s: float) -> str:
    """The result of `AggregatorServer.statistics` in Prometheus' text format.

    >>> counted = {"jobs": {"running": 1, "gathering": 0, "done": 2}, "failed": {"left": 3}, "refused": {}}
    >>> text = exposition({**counted, "rounds": 4, "payload_bytes": 5, "workers": 8}, 1024, 9.5)
    >>> [line for line in text.splitlines() if line.startswith("dynamix_aggregator_jobs_failed_total")]
    ['dynamix_aggregator_jobs_failed_total{kind="left"} 3']
    """
    samples: dict[str, list[tuple[str, float]]] = {name: [] for name in ABOUT}

    def put(name: str, value: float, labels: str = "") -> None:
        samples[f"dynamix_aggregator_{name}"].append((labels, value))

    jobs = statistics["jobs"]
    for state in ("running", "gathering"):
        put("jobs", jobs[state], f'{{state="{state}"}}')
    put("jobs_done_total", jobs["done"])
    for name, key in (("jobs_failed_total", "failed"), ("refused_total", "refused")):
        for kind, count in sorted(statistics[key].items()):
            put(name, count, f'{{kind="{kind}"}}')
    put("rounds_total", statistics["rounds"])
    put("received_bytes_total", statistics["payload_bytes"])
    for key, name in _NAMES.items():
        put(name, statistics.get(key, 0))
    put("memory_limit_bytes", memory_limit_bytes)
    put("uptime_seconds", uptime_s)
    put("processor_seconds_total", time.process_time())
    return "".join(_lines(samples))


def _lines(samples: Mapping[str, list[tuple[str, float]]]) -> Iterator[str]:
    for name, values in samples.items():
        yield f"# HELP {name} {ABOUT[name]}\n"
        yield f"# TYPE {name} {'counter' if name in COUNTERS else 'gauge'}\n"
        for labels, value in values:
            yield f"{name}{labels} {value:.10g}\n"
