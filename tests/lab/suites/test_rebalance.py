"""`scripts/rebalance`: what its result says, and that it is kept and shown."""

from __future__ import annotations

import json
from pathlib import Path

from dynamix_lab.results.record import record
from dynamix_lab.results.tables import markdown_of
from dynamix_lab.suites.rebalance import conclude


def test_speed_is_compared_with_transformers_sampler_by_seed_and_the_result_is_kept(tmp_path: Path) -> None:
    speeds = {"transformers": (100.0, 120.0), "lb_bsp lengths": (150.0, 180.0)}
    rows = [
        {"seed": seed, "devices": "uneven", "way": way, "samples_per_s": each[seed], "waiting": 0.25}
        for way, each in speeds.items()
        for seed in range(2)
    ]
    about = {"schema": 1, "command": "scripts/rebalance --seeds 2", "commit": "abc123", "cluster": "slept"}
    result = {**about, "machine": {"cpu": "Example 1000", "cores": 2, "system": "Linux 6"}, **conclude(rows)}
    assert "| uneven | lb_bsp lengths | 165 | 1.50 (1.50-1.50) | 25 % |" in markdown_of(result)
    (tmp_path / "result.json").write_text(json.dumps(result))
    run = {"started": "2026-11-24T10:00:00+00:00", "host": {"cpu": "Example 1000"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    kept = record(tmp_path, "rebalance", results=tmp_path / "results")
    assert (kept / "command").read_text() == "scripts/rebalance --seeds 2\n"
