"""How a job is divided among its workers, and how another one goes on with it: with other workers, other bounds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.data import Allocations
from dynamix.model.ways import Ways
from dynamix.projection import project
from dynamix.runtime.decide.job_facts import JobFacts
from dynamix.runtime.expected import MOST, fields, of_type, whole, wholes, wrong
from dynamix.runtime.part import Part
from dynamix.runtime.ranks.hosts import remembered, shares_of, workers_of
from dynamix.window import Ints

MOST_WORKERS = 2**20


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a job goes on with.

    same     the workers are those that saved the state, as far as that is known: each has its own measurements
    rounds, sizes, pieces   of its ledger: from which rounds on how many samples per round, (W,), hold, and how many a
             worker's own step has (0: workers do not step apart)
    opens    the round from which measurements count
    """

    same: bool
    rounds: list[int]
    sizes: list[Ints]
    pieces: list[int]
    opens: int


class Division(Part):
    """The facts of a job and its ledger: what the states of all other parts depend on.

    world_size, rank       of the job that saved a state, and whose `state_dict()` it is
    hosts                  `names` of its ranks' hosts, or none where they are not known; `shares`, relative, of all
                           workers that ever were there, by `hosts.workers_of`
    accumulate, base_batch pieces of a round, and samples per round of all workers at the start (B0)
    ledger_rounds, ledger_sizes   which samples per round hold from which round on; a row has one number more, the
                           samples of a worker's own step, where workers step apart
    """

    KEYS = ("world_size", "rank", "hosts", "accumulate", "base_batch", "ledger_rounds", "ledger_sizes")

    def __init__(self, rank: int, job: JobFacts, allocations: Allocations) -> None:
        self.rank, self.workers, self.job, self.allocations = rank, allocations.workers, job, allocations

    def state_dict(self) -> dict[str, Any]:
        job, ledger = self.job, self.allocations.state_dict()
        accumulate, shares = job.accumulate, job.shares
        if job.hosts:
            shares = remembered(shares, workers_of(job.hosts), np.asarray(ledger["sizes"][-1]) // accumulate)
        pieces = ledger.get("pieces", [0] * len(ledger["steps"]))
        return {
            "world_size": self.workers,
            "rank": self.rank,
            "hosts": {"names": list(job.hosts), "shares": shares},
            "accumulate": accumulate,
            "base_batch": job.base_batch,
            "ledger_rounds": ledger["steps"],
            "ledger_sizes": [
                [*row, piece] if piece else row for row, piece in zip(ledger["sizes"], pieces, strict=True)
            ],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        accumulate, rows = state["accumulate"], of_type("ledger_sizes", state["ledger_sizes"], list)
        workers = whole("world_size", state["world_size"], 1, MOST_WORKERS)
        whole("rank", state["rank"], 0, workers - 1)
        whole("accumulate", accumulate, 1, MOST)
        whole("base_batch", state["base_batch"], 1, MOST)
        _require_hosts(state["hosts"], workers)
        begins = wholes("ledger_rounds", state["ledger_rounds"])
        if not begins or begins != sorted(set(begins)):
            wrong("ledger_rounds", begins, "numbers that rise")
        if len(begins) != len(rows):
            wrong("ledger_sizes", f"{len(rows)} entries", f"as many as ledger_rounds, which are {len(begins)}")
        for row in rows:
            each = wholes("ledger_sizes", row)[:workers]
            if not workers <= len(row) <= workers + 1 or not all(row[workers:]):
                wrong("ledger_sizes", row, f"{workers} numbers, and one above 0 where workers step apart")
            if not any(each) or np.remainder(each, accumulate).any():
                wrong("ledger_sizes", row, f"multiples of accumulate={accumulate}, at least one above 0")

    def resumed(self, saved: Mapping[str, Any]) -> Resumed:
        """How this job goes on from a `saved` state. Raises `ConfigError` where a fixed global batch is out of bounds.

        It has the saved ledger, within the bounds of today. With other workers the global batch is kept: those whose
        hosts were there before have the shares that they had, new ones the mean of these. Where workers step apart,
        what they train at the same time is kept too.
        """
        job, workers, before = self.job, self.workers, saved["world_size"]
        bounds, names = job.bounds_from(saved["base_batch"]), saved["hosts"]["names"]
        same = before == workers and not (job.hosts and names and list(job.hosts) != names)
        now, rounds = saved["source"]["rounds"], saved["ledger_rounds"]
        first = max(i for i, begin in enumerate(rounds) if begin <= max(now, rounds[0]))
        sizes = [np.asarray(row[:before], dtype=np.int64) for row in saved["ledger_sizes"]]
        apart = isinstance(job.rounds, Ways)
        pieces = [row[before] if apart and len(row) > before else 0 for row in saved["ledger_sizes"]]
        if same:
            ahead = zip(sizes[first:], pieces[first:], strict=True)
            to_come = [project(of, job.bounds_of(piece, bounds)) for of, piece in ahead]
            fits = all(map(np.array_equal, to_come, sizes[first:]))
            if fits and not np.remainder(sizes, job.accumulate).any():
                return Resumed(same, rounds, sizes, pieces, saved["progress"]["opens"])
            within, piece = to_come[-1], pieces[-1]
        else:
            known = job.hosts or ("",) * workers
            shares, total = shares_of(saved["hosts"]["shares"], workers_of(known)), sizes[first].sum()
            piece = max(round(pieces[first] * before / workers), 1) if pieces[first] else 0
            within = project(shares * total / shares.sum(), job.bounds_of(piece, bounds), total=total)
        return Resumed(same, [now], [within], [piece], now)

    def go_on(self, saved: Mapping[str, Any], resumed: Resumed) -> None:
        """Go on so from a `saved` state."""
        progress = saved["progress"]
        self.job.resume(saved["base_batch"], progress["steps"], progress["samples"], saved["hosts"]["shares"])
        ledger = {"steps": resumed.rounds, "sizes": resumed.sizes, "pieces": resumed.pieces}
        self.allocations.load_state_dict(ledger)

    def warn_of_batch(self, saved: Mapping[str, Any]) -> None:
        """Warn if the state brings another global batch than the script asks for; other workers share the saved one."""
        here, workers, accumulate = self.job.base_batch, self.workers, self.job.accumulate
        began, theirs = saved["base_batch"], saved["accumulate"]
        if self.rank != 0 or saved["world_size"] != workers or began == here:
            return
        why = f"the loaded state goes on with a global batch of {began} samples, as the job that saved it began"
        mine = f"batch_size={here / workers / accumulate:g}, accumulate={accumulate} on {workers} workers"
        write = f"batch_size={began / workers / theirs:g}, accumulate={theirs}"
        fix = f"Write {write}, or leave load_state_dict out to begin with yours"
        said = f"{why}; this script asks for {here} ({mine}), which is not used. {fix}"
        warnings.warn(said, RuntimeWarning, stacklevel=5)


def _require_hosts(hosts: Any, workers: int) -> None:
    fields("hosts", hosts, {"names": list, "shares": dict})
    names, shares = hosts["names"], hosts["shares"]
    if set(map(type, names)) - {str} or (names and len(names) != workers):
        wrong("hosts.names", names, f"a list of {workers} names, or none")
    if set(map(type, shares)) - {str} or set(map(type, shares.values())) - {float}:
        wrong("hosts.shares", shares, "numbers by name")
    for worker, share in shares.items():
        if not 0 <= share <= MOST:
            wrong(f"hosts.shares[{worker!r}]", share, f"a number from 0 to {MOST}")
