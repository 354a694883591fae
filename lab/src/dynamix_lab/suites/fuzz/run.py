"""Damage inputs until a count or a time is reached, and say what came of them."""

from __future__ import annotations

import random
import resource
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from dynamix_lab.suites.fuzz.targets import Target

WARM_UP = 200  # inputs after which memory counts as growth
KINDS = ("states", "events", "policy-files", "scenarios", "traces")


def fuzz(target: Target, *, inputs: int, seconds: float, seed: int) -> dict[str, Any]:
    """Try inputs until `inputs` are tried or `seconds` are over; `foreign` holds the first of each kind of escape."""
    outcomes, foreign = Counter[str](), dict[str, Any]()
    began, base_kb, tried = time.monotonic(), 0, 0
    while tried < inputs and time.monotonic() - began < seconds:
        if tried == WARM_UP:
            base_kb = _most_kb()
        rng = random.Random(f"{target.name} {seed} {tried}")
        tried += 1
        try:
            outcomes["taken" if target.attempt(rng) else "refused"] += 1
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next((f for f in reversed(frames) if "/dynamix/" in f.filename), frames[-1])
            key = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            outcomes["foreign"] += 1
            foreign.setdefault(key, {"input": tried - 1, "times": 0, "error": str(error)[:300]})["times"] += 1
    grown = (_most_kb() - base_kb) / 1024 if base_kb else 0.0
    more = {"trained_out": target.trained} if hasattr(target, "trained") else {}
    spent = round(time.monotonic() - began, 1)
    return {"inputs": tried, **outcomes, **more, "grown_mb": round(grown, 1), "seconds": spent, "escapes": foreign}


def _most_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
