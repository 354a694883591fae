"""Tries damaged inputs up to a count or a time, and reports the outcomes."""

from __future__ import annotations

import random
import resource
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from dynamix_lab.suites.fuzz.targets import Target

WARM_UP = 200  # inputs after which growth of memory counts
_FILES = ("states", "events", "policy-files", "scenarios", "traces")
KINDS = (*_FILES, "handshakes", "worker-messages", "aggregator-messages")


class Tally:
    """The outcomes of the inputs of one target."""

    def __init__(self, target: Target) -> None:
        self.target, self.tried = target, 0
        self._outcomes, self._foreign = Counter[str](), dict[str, Any]()
        self._began, self._base_kb = time.monotonic(), 0

    @property
    def seconds(self) -> float:
        """Seconds since the first input could be tried."""
        return time.monotonic() - self._began

    def attempt(self, rng: random.Random) -> None:
        """Try one more input."""
        if self.tried == WARM_UP:
            self._base_kb = _most_kb()
        self.tried += 1
        try:
            self._outcomes["taken" if self.target.attempt(rng) else "refused"] += 1
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next((f for f in reversed(frames) if "/dynamix/" in f.filename), frames[-1])
            key = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            self._outcomes["foreign"] += 1
            about = self._foreign.setdefault(key, {"input": self.tried - 1, "times": 0, "error": str(error)[:300]})
            about["times"] += 1

    def found(self) -> dict[str, Any]:
        """Counts, growth in MB after the first inputs, and the first of each kind of unexpected error."""
        grown = (_most_kb() - self._base_kb) / 1024 if self._base_kb else 0.0
        more = {"trained_out": self.target.trained} if hasattr(self.target, "trained") else {}
        about = {"grown_mb": round(grown, 1), "seconds": round(self.seconds, 1), "escapes": self._foreign}
        return {"inputs": self.tried, **self._outcomes, **more, **about}


def fuzz(target: Target, *, inputs: int, seconds: float = float("inf"), seed: int) -> dict[str, Any]:
    """Try inputs until `inputs` are tried or `seconds` are over. Returns the outcomes as `Tally.found`."""
    tally = Tally(target)
    while tally.tried < inputs and tally.seconds < seconds:
        tally.attempt(random.Random(f"{target.name} {seed} {tally.tried}"))
    return tally.found()


def _most_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
