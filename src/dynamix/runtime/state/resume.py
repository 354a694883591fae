"""A job's position in the data and its division among workers, and how another job resumes from them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dynamix.data import Allocations, BatchSampler, Stream
from dynamix.data.selection import SELECTED
from dynamix.errors import StateError, shown
from dynamix.projection import project
from dynamix.runtime.facts.job_facts import JobFacts
from dynamix.runtime.part import MOST, Part, fields, of_type, whole, wholes, wrong
from dynamix.runtime.ranks.hosts import remembered, shares_of, workers_of
from dynamix.runtime.state.packing import alike

MOST_WORKERS = 2**20
ORDER = ("dataset_size", "seed", "shuffle", "partition", "sharded")  # must be equal in a job that resumes
CHECKSUMS = ("lengths", "order", *SELECTED)  # of the sampler's arguments, and its order's name; empty by default
PLACE = {"epoch": int, "position": int, "rounds": int, "finished": bool, "taken": list}
_STREAM = {**PLACE, **dict.fromkeys((*ORDER, "kind", "cuts", "regions", "iterable"), object), "sharded": bool}
_SAMPLER = {**_STREAM, "dataset_size": int, "shuffle": bool}


class SourceState(Part):
    """Keeps a loaded state until there is a sampler or stream to resume from it.

    Its state holds `kind` (none, sampler, stream), `PLACE` and `ORDER`, `cuts` and `regions` of the epoch, and this
    rank's own state of the `iterable`. Nonempty `CHECKSUMS` are stored with the cuts, so a state without them has the
    same form as earlier ones.
    """

    name = "source"

    def __init__(self, workers: int, accumulate: int) -> None:
        self.workers, self.accumulate = workers, accumulate
        self._source: BatchSampler | Stream | None = None
        self._waiting: dict[str, Any] | None = None

    def feed(self, source: BatchSampler | Stream) -> None:
        """Take samples from `source` from now on. It resumes from a loaded state."""
        if self._waiting is not None:
            source.check_state(self._waiting)
            source.go_on(self._waiting)
        self._source, self._waiting = source, None

    def state_dict(self) -> dict[str, Any]:
        state = {} if self._source is None else self._source.state_dict()
        none = {"epoch": 0, "position": 0, "finished": False, "taken": [0] * self.workers, **dict.fromkeys(ORDER)}
        order = {name: state.get(name, value) for name, value in none.items()}
        if state:
            order["sharded"] = bool(order["sharded"])
        cuts, given = state.get("cuts", []), {name: state[name] for name in CHECKSUMS if state.get(name)}
        return {
            "kind": "none" if not state else "sampler" if "dataset_size" in state else "stream",
            "rounds": state.get("consumed", 0) // self.accumulate,
            **order,
            "cuts": {"cuts": cuts, **given} if given else cuts,
            "regions": state.get("regions"),
            "iterable": state.get("source"),
        }

    def check(self, state: Any) -> None:
        _require_place(state)
        own = self._own(state)
        if own is None or self._source is None:
            return
        for name in ORDER:
            saved, mine = own[name], getattr(self._source, name, False if name == "sharded" else None)
            if type(saved) is not type(mine) or saved != mine:
                both = f"{name}={shown(saved)} in the checkpoint, {name}={shown(mine)} here"
                why = "the order of samples would differ, and some would be lost or repeated"
                raise StateError(f"{both}: {why}; resume with the data set and sampler that saved it")
        self._source.check_state(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self._own(state)
        if self._source is None:
            self._waiting = own
        elif own is not None:
            self._source.go_on(own)

    def _own(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """The sampler's or stream's own state; None if there was no sampler or stream."""
        if state["kind"] == "none":
            return None
        given = state["cuts"] if isinstance(state["cuts"], dict) else {"cuts": state["cuts"]}
        counted = {"consumed": state["rounds"] * self.accumulate, "source": state["iterable"]}
        return {**state, **dict.fromkeys(CHECKSUMS, ""), **given, **counted}


def _require_place(state: Any) -> None:
    """Raise `StateError` for a state that no `SourceState` wrote, or a position that is impossible."""
    kind = state.get("kind")
    if kind == "none":
        if not alike(state, SourceState(len(wholes("source.taken", state.get("taken"))), 1).state_dict()):
            wrong("source", "a place", "nothing where no sampler was made")
        return
    if kind not in ("sampler", "stream"):
        wrong("source.kind", kind, "none, sampler, stream")
    fields("source", state, _SAMPLER if kind == "sampler" else _STREAM)
    taken, position = sum(wholes("source.taken", state["taken"])), state["position"]
    if taken > position:
        wrong("source.taken", f"{taken} samples", f"at most position={position}")
    if isinstance(cuts := state["cuts"], dict):
        fields("source.cuts", cuts, {"cuts": list, **{name: str for name in CHECKSUMS if name in cuts}})
        cuts = cuts["cuts"]
    if kind == "sampler":
        _require_cuts(state, cuts, taken)
    elif cuts or state["regions"] is not None or state["dataset_size"] is not None:
        wrong("source", "a stream with regions", "neither cuts nor regions nor a size")


def _require_cuts(state: dict[str, Any], cuts: Any, taken: int) -> None:
    """Raise `StateError` for cuts of the epoch's order that exceed the data set or contradict `taken`."""
    size, position, regions = state["dataset_size"], state["position"], state["regions"]
    if not size > 0 or position > size or state["finished"] != (position == size):
        said = f"position={position}, finished={state['finished']}"
        wrong("source.position", said, f"at most dataset_size={size}, and finished there")
    if type(cuts) is not list:
        wrong("source.cuts", cuts, "a list")
    for cut in cuts:
        fields("source.cuts", cut, {"lengths": list, "taken": list})
        lengths = wholes("source.cuts", cut["lengths"])
        if np.greater(wholes("source.cuts", cut["taken"], len(lengths)), lengths).any() or sum(lengths) > size:
            wrong("source.cuts", cut, "taken at most lengths, lengths at most the data set")
    if regions is None:
        return
    fields("source.regions", regions, {"begin": int, "lengths": list, "rules": object, "sizes": list})
    begin, lengths = regions["begin"], wholes("source.regions.lengths", regions["lengths"], len(state["taken"]))
    if not any(wholes("source.regions.sizes", regions["sizes"], len(lengths))):
        wrong("source.regions.sizes", regions["sizes"], "at least one above 0")
    if sum(lengths) != size - begin or begin + taken != position or np.greater(state["taken"], lengths).any():
        wrong("source.regions", f"begin={begin}, {sum(lengths)} samples", f"those of position={position}")


class Resumed(NamedTuple):
    """The values from which a job resumes.

    same     whether the workers are known to be those that saved the state: then each keeps its own measurements
    opens    the first round whose measurements count
    ledger   a state of `Allocations`: the round from which each entry applies, its samples per round, (W,), and the
             samples of a local step (0: no local steps)
    """

    same: bool
    opens: int
    ledger: dict[str, Any]


class Division(Part):
    """The job's facts and allocations, on which the states of all other parts depend.

    world_size, rank       of the job that saved the state; `rank` is the rank whose `state_dict()` it is
    hosts                  `names` of its ranks' hosts, empty if unknown; relative `shares` of all workers that were
                           ever in the job, by `hosts.workers_of`
    accumulate, base_batch micro-batches per round, and samples per round of all workers at the start (B0)
    ledger_rounds, ledger_sizes   the round from which each row of samples per round applies; with local steps a row has
                                  one number more, the samples of a local step
    """

    KEYS = ("world_size", "rank", "hosts", "accumulate", "base_batch", "ledger_rounds", "ledger_sizes")

    def __init__(self, rank: int, job: JobFacts, allocations: Allocations) -> None:
        self.rank, self.workers, self.job, self.allocations = rank, allocations.workers, job, allocations

    def state_dict(self) -> dict[str, Any]:
        job, (begins, sizes, pieces) = self.job, self.allocations.entries
        known = remembered(job.shares, workers_of(job.hosts), sizes[-1] // job.accumulate) if job.hosts else job.shares
        return {
            "world_size": self.workers,
            "rank": self.rank,
            "hosts": {"names": list(job.hosts), "shares": known},
            "accumulate": job.accumulate,
            "base_batch": job.base_batch,
            "ledger_rounds": list(begins),
            "ledger_sizes": [of.tolist() + [piece] * bool(piece) for of, piece in zip(sizes, pieces, strict=True)],
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
        """How this job resumes from a `saved` state. Raises `ConfigError` if a fixed global batch is out of bounds.

        It uses the saved allocations, within today's bounds. With other workers the global batch is kept: workers on
        earlier hosts keep their shares, and new workers get the mean of these. With local steps, the samples that
        workers train simultaneously are kept, too.
        """
        job, workers, before = self.job, self.workers, saved["world_size"]
        bounds, names = job.bounds_from(saved["base_batch"]), saved["hosts"]["names"]
        same = before == workers and not (job.hosts and names and list(job.hosts) != names)
        now, rounds = saved["source"]["rounds"], saved["ledger_rounds"]
        first = max(i for i, begin in enumerate(rounds) if begin <= max(now, rounds[0]))
        sizes = [np.asarray(row[:before], dtype=np.int64) for row in saved["ledger_sizes"]]
        pieces = [row[before] if job.sync_schedule.mixed and len(row) > before else 0 for row in saved["ledger_sizes"]]
        if same:
            ahead = zip(sizes[first:], pieces[first:], strict=True)
            to_come = [project(of, job.sync_schedule.bounds_of(piece, bounds)) for of, piece in ahead]
            if all(map(np.array_equal, to_come, sizes[first:])) and not np.remainder(sizes, job.accumulate).any():
                return Resumed(same, saved["progress"]["opens"], {"steps": rounds, "sizes": sizes, "pieces": pieces})
            within, piece = to_come[-1], pieces[-1]
        else:
            known = job.hosts or ("",) * workers
            shares, total = shares_of(saved["hosts"]["shares"], workers_of(known)), sizes[first].sum()
            piece = max(round(pieces[first] * before / workers), 1) if pieces[first] else 0
            within = project(shares * total / shares.sum(), job.sync_schedule.bounds_of(piece, bounds), total=total)
        return Resumed(same, now, {"steps": [now], "sizes": [within], "pieces": [piece]})

    def go_on(self, saved: Mapping[str, Any], resumed: Resumed) -> None:
        """Apply a `saved` state in this way."""
        progress = saved["progress"]
        if self.rank == 0 and not resumed.same:
            logging.getLogger("dynamix").info("the state is of other workers or hosts: the policy begins anew")
        self.job.resume(saved["base_batch"], progress["steps"], progress["samples"], saved["hosts"]["shares"])
        self.allocations.load_state_dict(resumed.ledger)

    def warn_of_batch(self, saved: Mapping[str, Any]) -> None:
        """Warn if the state sets another global batch than the script; with other workers the saved one is kept."""
        here, workers, accumulate = self.job.base_batch, self.workers, self.job.accumulate
        began, theirs = saved["base_batch"], saved["accumulate"]
        if self.rank != 0 or saved["world_size"] != workers or began == here:
            return
        why = f"the loaded state goes on with a global batch of {began} samples, with which its job began"
        mine = f"{here} (batch_size={here / workers / accumulate:g}, accumulate={accumulate} on {workers} workers)"
        fix = f"Write batch_size={began / workers / theirs:g}, accumulate={theirs}; or, to keep yours, load no state"
        warnings.warn(f"{why}; this script asks for {mine}, which is ignored. {fix}", RuntimeWarning, stacklevel=5)


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
