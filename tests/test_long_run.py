"""A job that saves and loads again and again holds as much at its end as near its beginning."""

import json
from pathlib import Path

import pytest

from dynamix.events.records import read_events
from tests.ranks import run_script

ROOT = Path(__file__).parents[1]


@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_memory_threads_descriptors_and_keys_are_flat_and_events_bounded(tmp_path: Path) -> None:
    given = ["--out", "run", "--steps", "700", "--saves", "16", "--events-mb", "0.05"]
    run_script(ROOT / "scripts/long-run", given, folder=tmp_path, timeout_s=280)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["flat"] == dict.fromkeys(("memory_mb", "threads", "descriptors", "keys"), True)
    assert all(point["events_mb"] < 0.06 for of_rank in result["ranks"] for point in of_rank)
    events = read_events(tmp_path / "run/events.jsonl")
    assert events[-1]["samples_seen"] > 650 * 8
