"""A run folder that several runs write to, and that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamix.events.records import EventLog, read_events
from dynamix.events.run_folder import RunFolder


def read_run(folder: RunFolder) -> dict[str, Any]:
    """run.json as an earlier call wrote it; empty if there is none."""
    path = folder.path / "run.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def adopt_events(folder: RunFolder, path: Path, **labels: Any) -> list[dict[str, Any]]:
    """Move another file's events to the end of events.jsonl, each with `labels` added. Returns them."""
    events = [{**event, **labels} for event in read_events(path)] if path.exists() else []
    _append(folder.path / "events.jsonl", events)
    path.unlink(missing_ok=True)
    return events


def keep_events(folder: RunFolder, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Remove the lines of events.jsonl that `keep` rejects. Returns the others."""
    path = folder.path / "events.jsonl"
    if not path.is_file():
        return []
    events = [event for event in read_events(path) if keep(event)]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(b"")
    _append(unfinished, events)
    unfinished.replace(path)
    return events


def _append(path: Path, events: list[dict[str, Any]]) -> None:
    with EventLog(path) as log:
        for event in events:
            log.write(**{key: value for key, value in event.items() if key != "schema"})
