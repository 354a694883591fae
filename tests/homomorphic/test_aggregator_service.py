"""An aggregator as a service: health, figures, what it says when it is stopped, and the recipes that start it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.metrics import COUNTERS, GAUGES, MetricsServer
from dynamix_homomorphic.aggregator.protocol import ADD
from dynamix_homomorphic.aggregator.server import AggregatorServer
from tests.homomorphic.aggregators import SMALL, eventually, join

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples/recipes"


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answered:
            return answered.status, answered.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def metrics(server: AggregatorServer) -> Iterator[str]:
    """Where the figures of `server` are, without "metrics" at the end."""
    with MetricsServer(server, 0) as offered:
        yield offered.url.removesuffix("metrics")


def test_figures_are_in_the_format_of_prometheus(server: AggregatorServer, metrics: str) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    client = join(server, 1)[0]
    client.reduce_((ADD, np.ones(5000, np.int32).view(np.uint8)))
    first = {
        s.name: s.value for f in parser.text_string_to_metric_families(get(f"{metrics}metrics")[1]) for s in f.samples
    }
    assert first["dynamix_aggregator_received_bytes_total"] == 20_000
    assert first["dynamix_aggregator_workers"] == 1
    assert first["dynamix_aggregator_memory_limit_bytes"] == SMALL.memory_bytes
    client._sock.send(b"nonsense" * 5)
    eventually(lambda: server.statistics()["failed"] == {"damaged": 1})
    families = list(parser.text_string_to_metric_families(get(f"{metrics}metrics")[1]))
    assert {f"{f.name}_total" if f.type == "counter" else f.name for f in families} == {*GAUGES, *COUNTERS}
    counted = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert counted[("dynamix_aggregator_jobs_failed_total", "damaged")] == 1
    assert counted[("dynamix_aggregator_jobs", "running")] == 0


def test_every_figure_is_documented() -> None:
    text = (ROOT / "docs/design/aggregator.md").read_text()
    for name in (*GAUGES, *COUNTERS):
        assert f"`{name}`" in text


def test_health_is_that_of_the_thread_that_lets_workers_in(server: AggregatorServer, metrics: str) -> None:
    status, text = get(f"{metrics}healthz")
    assert (status, json.loads(text)["healthy"]) == (200, True)
    assert get(f"{metrics}elsewhere")[0] == 404
    stuck = AggregatorServer()
    stuck.beat_s = time.monotonic() - 60
    with MetricsServer(stuck, 0) as offered:
        assert get(offered.url.replace("metrics", "healthz"))[0] == 503
        with pytest.raises(ConfigError, match="metrics_port"):
            MetricsServer(stuck, int(offered.url.split(":")[2].partition("/")[0]))
    stuck.close()


def test_stopping_it_as_a_service_is_stopped_prints_what_happened() -> None:
    command = [sys.executable, "-m", "dynamix.cli.app", "aggregator", "--metrics-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        where = json.loads(server.stdout.readline())
        assert get(where["metrics"])[0] == 200
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=30)
    assert json.loads(said)["jobs"]["running"] == 0
    assert server.returncode == 0


def _options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


@pytest.mark.parametrize(
    ("file", "begin"), [("dynamix-aggregator.service", "ExecStart"), ("aggregator.Containerfile", "ENTRYPOINT")]
)
def test_recipes_use_options_that_the_command_has(file: str, begin: str) -> None:
    line = re.search(rf"^{begin}.*?[^\\]$", (RECIPES / file).read_text(), re.DOTALL | re.MULTILINE)
    assert line is not None
    known = _options(CliRunner().invoke(app, ["aggregator", "--help"], env={"COLUMNS": "200"}).output)
    assert len(_options(line[0])) >= 5
    assert _options(line[0]) <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "dynamix-aggregator.service"
    text = (RECIPES / unit.name).read_text()
    assert "/opt/dynamix/bin/dynamix aggregator" in text
    unit.write_text(text.replace("/opt/dynamix/bin/dynamix", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr
