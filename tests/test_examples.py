"""Every example runs as its first lines say."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sqlite3
from pathlib import Path

import pytest

from dynamix_homomorphic.aggregator.server import AggregatorServer
from tests.processes import run
from tests.ranks import run_script
from tests.telemetry.simulated import simulate

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.multiproc


FILM = "excavation.py"
LOGGERS = "loggers.py"
# The last three in tests/integrations and, by torchrun itself, in tests/runtime/decide/test_alternating.py.
ELSEWHERE = (FILM, LOGGERS, "ray_train.py", "torchft_replicas.py", "balance.py")


@pytest.mark.parametrize(
    "line", [*sorted(p.name for p in EXAMPLES.glob("*.py") if p.name not in ELSEWHERE), "local_steps.py --meet auto"]
)
def test_example_runs(line: str, tmp_path: Path) -> None:
    """On as many ranks as it says."""
    name, *options = line.split()
    script = EXAMPLES / name
    ranks = re.search(rf"torchrun --nproc-per-node (\d) examples/{name}", script.read_text())
    with contextlib.ExitStack() as stack:
        if name == "sparse_gradients.py":
            aggregator = stack.enter_context(AggregatorServer())
            options += ["--aggregator", aggregator.address]
        if name == "exporter.py":
            options += [str(simulate(tmp_path / "events.jsonl", windows=5)), "--once"]
        if name == "elastic.py":
            options += ["--folder", str(tmp_path)]
        said = run_script(script, options, ranks=None if ranks is None else int(ranks[1]))
    if name == "sparse_gradients.py":
        assert "'compaction': " in said
        assert "'lost': 0" in said
    if name == "exporter.py":
        assert 'dynamix_windows_total{run="' in said


def test_the_example_of_agents_that_learn_writes_its_film(tmp_path: Path) -> None:
    film = tmp_path / "film.gif"
    assert "step 20: " in run(EXAMPLES / FILM, "--scale", "0.01", "--steps", "20", "--gif", film).stdout
    assert film.read_bytes().startswith(b"GIF8")


LOGGED = {"tensorboard": "events.out.tfevents.*", "wandb": "wandb/offline-run-*/*.wandb", "mlflow": "mlflow.db"}


@pytest.mark.parametrize("logger", LOGGED)
def test_metrics_reach_the_loggers_that_are_installed(logger: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(logger) is None:
        pytest.skip(f"{logger} is not installed")
    run_script(EXAMPLES / LOGGERS, ["--to", logger, "--folder", str(tmp_path)], ranks=2)
    (kept,) = tmp_path.glob(LOGGED[logger])
    if logger == "mlflow":
        with contextlib.closing(sqlite3.connect(kept)) as store:
            rows = store.execute("select step, value from metrics where key = 'dynamix/samples'").fetchall()
        assert rows
        assert all(step == value for step, value in rows)
    else:
        assert b"dynamix/noise_scale" in kept.read_bytes()
