"""Compares S-MADRL with its baselines on the excavation task (`dynamix bench excavation`).

Every (method, seed) is one training, with the same curriculum and the same number of steps of the worlds. Its final
weights are evaluated with 1 to 8 agents. All methods have their classes' default settings. A finished (method, seed) is
a line of OUT/runs.jsonl. A call that finds such lines runs only the missing ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError, StateError
from dynamix_lab.excavation.config import ExperimentConfig
from dynamix_lab.excavation.summary import summarise
from dynamix_lab.excavation.trial import run_one


def run(
    config: ExperimentConfig | None = None,
    out: str | Path | None = None,
    *,
    processes: int = 1,
    minutes: float | None = None,
    tell: Callable[[str, float], None] = lambda what, done: None,
) -> dict[str, Any]:
    """Do the runs that `out` lacks, report the time that each took, and return the summary.

    minutes   after which no other training begins. The summary then has the finished runs, so methods may differ by
              one training. 0 only summarises `out`

    If a run fails, the runs in other processes are still finished and stored; then its error is raised. Raises
    `StateError` if `out` holds runs of another configuration or a damaged line.
    """
    if minutes is not None and not minutes >= 0:
        raise ConfigError("minutes", minutes, "0 or more", "leave it out to run everything")
    until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    config = config or ExperimentConfig()
    path = None if out is None else Path(out) / "runs.jsonl"
    runs = _finished(path, config)
    done = {(r["method"], r["seed"]) for r in runs}
    missing = [(m, s) for s in config.seeds for m in config.methods if (m, s) not in done]
    for result in _results(config, missing, processes, until):
        runs.append(result)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        took = f"{result['total_s']} s ({result['processor_s']} s of processor)"
        tell(f"{result['method']} seed {result['seed']}: {took}", len(runs) / (len(done) + len(missing)))
    return summarise(config, runs)


def _results(
    config: ExperimentConfig, missing: Sequence[tuple[str, int]], processes: int, until: float
) -> Iterator[dict[str, Any]]:
    if processes == 1:
        for method, seed in missing:
            if time.monotonic() >= until:
                return
            yield run_one(config, method, seed)
        return
    waiting, failed = list(missing), None
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        under_way: set[Future[dict[str, Any]]] = set()
        while True:
            while waiting and failed is None and len(under_way) < processes and time.monotonic() < until:
                under_way.add(pool.submit(run_one, config, *waiting.pop(0)))
            if not under_way:
                break
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                if (error := future.exception()) is None:
                    yield future.result()
                else:
                    failed = failed or error
    if failed is not None:
        raise failed


def _finished(path: Path | None, config: ExperimentConfig) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    try:
        runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        stale = {r["method"] for r in runs if r["fingerprint"] != config.fingerprint(r["method"])} & {*config.methods}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is damaged ({error}): remove its last line, that run is done again") from error
    if stale:
        names = ", ".join(sorted(stale))
        fix = f"remove the lines of {names}, or choose another folder"
        raise StateError(f"{path} holds runs of another configuration ({names}): {fix}")
    return runs
