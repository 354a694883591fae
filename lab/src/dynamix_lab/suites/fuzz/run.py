"""`scripts/fuzz`: damage inputs until a count or a time is reached, and say what came of them.

python -m dynamix_lab.suites.fuzz.run --kinds states,events --inputs 10000 --seed 1 --out fuzz.json
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from dynamix_lab.suites.fuzz.targets import Target, targets

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--inputs", type=int, default=10_000, help="of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="file for the figures as JSON")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"command": "fuzz", "seed": given.seed}
    with tempfile.TemporaryDirectory() as folder:
        known = targets(Path(folder))
        for kind in given.kinds.split(","):
            if kind not in known:
                parser.error(f"unknown kind {kind}: known are {', '.join(known)}")
            found[kind] = fuzz(known[kind](), inputs=given.inputs, seconds=given.seconds, seed=given.seed)
            print(json.dumps({kind: found[kind]}), flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps(found, indent=1))
    return int(any(found[kind]["escapes"] for kind in given.kinds.split(",")))


if __name__ == "__main__":
    sys.exit(main())
