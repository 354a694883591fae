"""Files as observed ranks write them, from what each takes for the parts of a step."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.observe.rank_file import RankFile
from dynamix.observe.recorder import FIELDS

EVEN = {"forward": 0.02, "backward": 0.04, "update": 0.002, "between": 0.005, "loader": 0.004}
OWN_S = 0.067  # of a step: all of them, as the loader is part of between
TRANSFER_S = 0.003


def write(
    folder: Path,
    more: list[dict[str, float]],
    *,
    steps: int = 60,
    sizes: Any = None,
    transfer_s: float = TRANSFER_S,
    passes: int = 1,
    when: Callable[[int], bool] = lambda step: True,
    **facts: Any,
) -> None:
    """What ranks write that take `more` seconds than EVEN by part, in the steps `when` they do, and meet in each."""
    took = [{name: EVEN[name] + extra.get(name, 0.0) for name in EVEN} for extra in more]
    for one, extra in zip(took, more, strict=True):
        one["between"] += extra.get("loader", 0.0)
    rng = np.random.default_rng(0)
    noise = 1 + 0.01 * rng.standard_normal((steps, len(more)))
    for rank in range(len(more)):
        rows = array("f")
        for step in range(steps):
            parts = took if when(step) else [EVEN] * len(more)
            own = [sum(s for n, s in one.items() if n != "loader") * noise[step, i] for i, one in enumerate(parts)]
            scaled = {name: value * noise[step, rank] for name, value in parts[rank].items()}
            scaled["exchange"] = max(own) - own[rank] + transfer_s
            size = 32 if sizes is None else sizes[step][rank]
            known = {"samples": size, "passes": passes, "end_s": 0.1 * (step + 1), **scaled}
            rows.extend(known[name] for name in FIELDS)
        file = RankFile(folder / "ranks/0", rank, {"world": len(more), "stack": "DDP", "device": "cpu", **facts})
        file.write(rows, ended=True)
        file.close()
