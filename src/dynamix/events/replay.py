"""Reads the decisions of an earlier run from its events file, for a run that repeats them."""

from __future__ import annotations

import os
from typing import Any

from dynamix.errors import ConfigError, StateError
from dynamix.events.records import each_event

_MOST = 2**53
_ANSWER = ("decision", "from_step", "allocation", "noise", "signal", "interval", "piece")


def recorded(path: str | os.PathLike[str], workers: int) -> dict[int, dict[str, Any]]:
    """Window index -> the recorded decision of an earlier run, which the run that repeats it takes too.

    Raises `StateError` for a file whose lines lack it, `ConfigError` for a run with another number of `workers`.
    """
    answers, worlds, fix = {}, set(), "replay the events.jsonl of a job, unchanged"
    for number, event in enumerate(each_event(path), 1):
        if "thinned" in event:
            why = "windows were left out of this file when it grew long (docs/run-folder.md)"
            raise StateError(f"{os.fspath(path)}: {why}, so the run cannot be replayed from it")
        if event.get("short"):
            continue  # no decision was made on it
        answer = {k: event[k] for k in _ANSWER if k in event}
        if why := _unfit(event.get("window_index"), answer):
            raise StateError(f"{os.fspath(path)}, event {number}: {why}; {fix}")
        answers[event["window_index"]] = answer
        worlds.add(len(answer["allocation"]))
    if not answers:
        raise StateError(f"{os.fspath(path)} has no decision to replay; {fix}")
    if workers not in worlds:
        fix = "replay with as many workers as the run had"
        raise ConfigError("replay", f"{max(worlds)} workers", f"a run of {workers}", fix)
    return answers


def _unfit(index: Any, answer: dict[str, Any]) -> str:
    """The faults of a recorded answer; empty if it has none."""
    if type(index) is not int or index < 0:
        return f"window_index={index!r} is no whole number"
    if answer.get("decision") not in ("new", "keep", "late", "failed"):
        return f"decision={answer.get('decision')!r} is none of new, keep, late, failed"
    if not {"noise", "signal"} <= answer.keys():
        return "it lacks noise and signal, as events of dynamix 0.1 do, which this version does not replay"
    for name in ("noise", "signal"):
        if type(answer.get(name)) not in (int, float, type(None)) or abs(answer.get(name) or 0) > _MOST:
            return f"{name}={answer[name]!r} is no number"
    for name, of in (("interval", "steps"), ("piece", "samples")):
        value = answer.get(name, 0)
        if type(value) is not int or not 0 <= value <= _MOST:
            return f"{name}={value!r} is no number of {of}"
    step = answer.get("from_step")
    if answer["decision"] == "new" and (type(step) is not int or not 0 <= step <= _MOST):
        return f"from_step={step!r} is no round"
    sizes = answer.get("allocation")
    if type(sizes) is not list or set(map(type, sizes)) != {int} or not 0 <= min(sizes) <= max(sizes) <= _MOST:
        return "allocation is no list of batch sizes"
    return ""
