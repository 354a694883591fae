"""The one schema of a controller's state: what it holds, how it is checked as a whole, and how it is written.

Everything counts rounds and samples per round. Keys are the same in every state, whatever the job is made of; parts
whose structure varies are packed (`packing`). A state is checked completely before any of it is applied.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dynamix.data.selection import SELECTED
from dynamix.errors import StateError, shown
from dynamix.runtime.state.packing import FIX, checksum, pack, unpack

STATE_SCHEMA = 2
MOST = 2**53  # of a counter
MOST_WORKERS = 2**20
SOURCES = ("none", "sampler", "stream")
ORDER = ("dataset_size", "seed", "shuffle", "partition", "sharded")  # what must be the same in a job that goes on
CHECKSUMS = ("lengths", "order", *SELECTED)  # of what the sampler was given, and its order's name; empty where usual
PLACE = ("epoch", "position", "rounds", "finished", "taken")


@dataclass(frozen=True)
class SavedState:
    """A state that has been checked, its parts unpacked.

    world_size, rank       of the job that saved it, and whose `state_dict()` it is
    hosts                  `names` of its ranks' hosts, or none where they are not known; `shares`, relative, of all
                           workers that ever were there, by `hosts.workers_of`
    accumulate, base_batch pieces of a round, and samples per round of all workers at the start (B0)
    progress               `Progress.state_dict()`
    ledger_rounds, ledger_sizes   which samples per round, (entries, W), hold from which round on
    ledger_pieces          (entries,) samples of a worker's own step, where workers step apart; 0 where they do not. In
                           the state it follows the sizes, where it is not 0
    source                 `kind`, `PLACE` and `ORDER` of the sampler or stream, `cuts` and `regions` of its epoch,
                           `CHECKSUMS`: of what samples cost, of a subset's indices, of weights; the order's name; empty
                           where usual
    policy, noise_scale, schedules, hooks   their own states; a hook for every model, in the order of `wrap`
    ranks                  rank -> what is a rank's own: `recorder`, `rng` and `iterable`; in a gathered state also
                           `policy`, where every rank decides for itself
    """

    world_size: int
    rank: int
    hosts: dict[str, Any]
    accumulate: int
    base_batch: int
    progress: dict[str, Any]
    ledger_rounds: list[int]
    ledger_sizes: list[list[int]]
    ledger_pieces: list[int]
    source: dict[str, Any]
    policy: Any
    noise_scale: dict[str, float]
    schedules: list[Any]
    hooks: list[Any]
    ranks: dict[int, dict[str, Any]]

    def write(self) -> dict[str, Any]:
        """The state as `controller.state_dict()` returns it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        state = {"schema": STATE_SCHEMA, "version": sys.modules["dynamix"].__version__, "checksum": "", **plain}
        for name in _PACKED:
            state[name] = pack(plain[name])
        state["source"] = _written(self.source)
        parts = zip(self.ledger_sizes, state.pop("ledger_pieces"), strict=True)
        state["ledger_sizes"] = [[*sizes, piece] if piece else sizes for sizes, piece in parts]
        state["checksum"] = checksum(state)
        return state

    @classmethod
    def read(cls, state: Any) -> SavedState:
        """What `write` returned, checked as a whole. Raises `StateError` naming the first thing that is wrong."""
        _require_schema(state)
        expected = {"schema", "version", "checksum"} | {field.name for field in fields(cls)} - {"ledger_pieces"}
        if state.keys() != expected:
            odd = sorted(map(str, state.keys() ^ expected))
            raise StateError(f"the controller's state lacks or has too many keys: {', '.join(odd[:5])}. {FIX}")
        if checksum(dict(state)) != state["checksum"]:
            raise StateError(f"the controller's state was changed after it was saved (its checksum differs). {FIX}")
        values = {name: state[name] for name in expected - {"schema", "version", "checksum"}}
        for name in _PACKED:
            values[name] = unpack(state[name], name)
        workers = _whole("world_size", state["world_size"], 1, MOST_WORKERS)
        values["source"] = _source(state["source"], workers)
        values["ledger_sizes"], values["ledger_pieces"] = _ledger_of(state["ledger_sizes"], workers)
        saved = cls(**values)
        saved._check(workers)
        return saved

    def _check(self, workers: int) -> None:
        _whole("rank", self.rank, 0, workers - 1)
        _hosts(self.hosts, workers)
        _whole("accumulate", self.accumulate, 1, MOST)
        _whole("base_batch", self.base_batch, 1, MOST)
        _progress(self.progress)
        _ledger(self.ledger_rounds, self.ledger_sizes, workers, self.accumulate)
        _noise(self.noise_scale)
        source = self.source
        if source["kind"] != "none":
            if self.ledger_rounds[0] > source["rounds"]:
                _wrong("ledger_rounds", self.ledger_rounds[0], f"at most source.rounds={source['rounds']}")
            if source["position"] > self.progress["samples"]:
                _wrong("source.position", source["position"], f"at most samples={self.progress['samples']}")
        _of_type("schedules", self.schedules, list)
        _of_type("ranks", self.ranks, dict)
        for hook in _of_type("hooks", self.hooks, list):
            _of_type("hooks", hook, dict)
        for rank, own in self.ranks.items():
            _whole("ranks", rank, 0, workers - 1)
            decides = ("policy",) if isinstance(own, dict) and "policy" in own else ()
            _keys(f"ranks[{rank}]", own, ("iterable", "recorder", "rng", *decides))
            recorder(own["recorder"])
        if self.rank not in self.ranks:
            _wrong("ranks", sorted(self.ranks), f"rank {self.rank} among them")


_PACKED = ("hosts", "policy", "schedules", "hooks", "ranks")


def _require_schema(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise StateError(f"the controller's state is {type(state).__name__}, not a dict. {FIX}")
    schema = state.get("schema")
    if type(schema) is int and schema == 1:
        raise StateError(
            "this state was saved by dynamix 0.1 (schema 1); this version reads states of 0.2 and later. Finish the "
            "job with dynamix 0.1, or begin a new one from the model's weights"
        )
    if "schema" not in state:
        inside = "Write controller.load_state_dict(state['controller'])" if "controller" in state else FIX
        raise StateError(f"this is no state of a controller: its keys are {shown(list(state)[:3])}. {inside}")
    if type(schema) is not int or schema != STATE_SCHEMA:
        version = f", saved by dynamix {state['version']}" if isinstance(state.get("version"), str) else ""
        found = f"{shown(schema)}{version}"
        raise StateError(f"the controller's state has schema {found}; this version reads {STATE_SCHEMA}")


def recorder(saved: Any) -> None:
    """Check a recorder's state: numbers by name of series, and pairs of means and deviations."""
    _keys("recorder", saved, ("before", "series", "steps"))
    _whole("recorder.steps", saved["steps"], 0, MOST)
    for part in ("series", "before"):
        _of_type(f"recorder.{part}", saved[part], dict)
        for name, values in saved[part].items():
            _of_type(f"recorder.{part}", name, str)
            _numbers(f"recorder.{part}.{name}", values)
            if part == "before" and len(values) != 2:
                _wrong(f"recorder.before.{name}", values, "two numbers")


def _progress(progress: Any) -> None:
    _keys("progress", progress, ("opens", "samples", "shared", "steps", "window"))
    for name in ("window", "steps", "opens", "samples"):
        _whole(f"progress.{name}", progress[name], 0, MOST)
    shared = _of_type("progress.shared", progress["shared"], list)
    if not 1 <= len(shared) <= 2:
        _wrong("progress.shared", shared, "one or two entries")
    for entry in shared:
        _numbers("progress.shared", entry)
        if len(entry) != 4:
            _wrong("progress.shared", entry, "four numbers: round, noise, signal, interval")
        _whole("progress.shared", entry[0], 0, MOST)
        _whole("progress.shared", entry[3], 0, MOST)


def _ledger(rounds: Any, sizes: Any, workers: int, pieces: int) -> None:
    _of_type("ledger_rounds", rounds, list)
    _of_type("ledger_sizes", sizes, list)
    if not rounds or len(rounds) != len(sizes):
        _wrong("ledger_sizes", f"{len(sizes)} entries", f"as many as ledger_rounds, which are {len(rounds)}")
    before = -1
    for begin in rounds:
        before = _whole("ledger_rounds", begin, before + 1, MOST)
    for of in sizes:
        each = _wholes("ledger_sizes", of, workers)
        if not any(each) or any(size % pieces for size in each):
            _wrong("ledger_sizes", of, f"multiples of accumulate={pieces}, at least one above 0")


def _ledger_of(rows: Any, workers: int) -> tuple[Any, list[Any]]:
    """Sizes of each entry, and the piece that follows them, 0 where none does."""
    if type(rows) is not list or set(map(type, rows)) - {list}:
        _wrong("ledger_sizes", rows, "a list of lists")
    pieces = [_whole("ledger_sizes", row[workers], 1, MOST) if len(row) == workers + 1 else 0 for row in rows]
    return [row[:workers] if piece else row for row, piece in zip(rows, pieces, strict=True)], pieces


def _hosts(hosts: Any, workers: int) -> None:
    _keys("hosts", hosts, ("names", "shares"))
    names = _of_type("hosts.names", hosts["names"], list)
    if set(map(type, names)) - {str} or (names and len(names) != workers):
        _wrong("hosts.names", names, f"a list of {workers} names, or none")
    for worker, share in _of_type("hosts.shares", hosts["shares"], dict).items():
        _of_type("hosts.shares", worker, str)
        if type(share) is not float or not 0 <= share <= MOST:
            _wrong(f"hosts.shares[{worker!r}]", share, f"a number from 0 to {MOST}")


def _noise(noise: Any) -> None:
    _keys("noise_scale", noise, ("mass", "noise", "signal"))
    for name, value in noise.items():
        _of_type(f"noise_scale.{name}", value, float)
    if not 0 <= noise["mass"] <= 1 or not np.isfinite([noise["noise"], noise["signal"]]).all():
        _wrong("noise_scale", noise, "finite numbers, mass 0 to 1")


def _written(source: dict[str, Any]) -> dict[str, Any]:
    """As `_source` reads it: checksums are beside the cuts, so that a state without them is as it ever was."""
    plain = {name: value for name, value in source.items() if name not in CHECKSUMS}
    given = {name: source[name] for name in CHECKSUMS if source[name]}
    cuts = {"cuts": source["cuts"], **given} if given else source["cuts"]
    return {**plain, "cuts": pack(cuts), "regions": pack(source["regions"])}


def _source(given: Any, workers: int) -> dict[str, Any]:
    if isinstance(given, dict) and "unused" in given:  # of 0.2
        if any(_wholes("source.unused", given["unused"], workers)):
            raise StateError(
                "this state was saved between two meetings of workers that met early: source.unused="
                f"{shown(given['unused'])}. Averaging(early=True) was removed in 0.3: write a state at the end of an "
                "epoch with dynamix 0.2, or begin a new job from the model's weights"
            )
        given = {name: value for name, value in given.items() if name != "unused"}
    _keys("source", given, tuple(sorted(("kind", *PLACE, *ORDER, "cuts", "regions"))))
    cuts, checksums = unpack(given["cuts"], "cuts"), dict.fromkeys(CHECKSUMS, "")
    if isinstance(cuts, dict):
        named = tuple(name for name in CHECKSUMS if name in cuts)
        _keys("source.cuts", cuts, ("cuts", *named))
        checksums |= {name: _of_type(f"source.{name}", cuts[name], str) for name in named}
        cuts = cuts["cuts"]
    source = {**given, "cuts": cuts, **checksums, "regions": unpack(given["regions"], "regions")}
    if source["kind"] not in SOURCES:
        _wrong("source.kind", source["kind"], ", ".join(SOURCES))
    if source["kind"] == "none":
        if source != no_source(workers):
            _wrong("source", "a place", "nothing where no sampler was made")
        return source
    for name in ("epoch", "position", "rounds"):
        _whole(f"source.{name}", source[name], 0, MOST)
    _wholes("source.taken", source["taken"], workers)
    for name in ("finished", "shuffle", "sharded"):
        if source["kind"] == "stream" and name == "shuffle":
            continue
        _of_type(f"source.{name}", source[name], bool)
    taken, position = sum(source["taken"]), source["position"]
    if taken > position:
        _wrong("source.taken", f"{taken} samples", f"at most position={position}")
    if source["kind"] == "sampler":
        _sampler(source, workers, taken)
    elif source["cuts"] or source["regions"] is not None or source["dataset_size"] is not None:
        _wrong("source", "a stream with regions", "neither cuts nor regions nor a size")
    return source


def _sampler(source: dict[str, Any], workers: int, taken: int) -> None:
    size = _whole("source.dataset_size", source["dataset_size"], 1, MOST)
    position = _whole("source.position", source["position"], 0, size)
    if source["finished"] != (position == size):
        _wrong("source.finished", source["finished"], f"whether position={position} is dataset_size={size}")
    for cut in _of_type("source.cuts", source["cuts"], list):
        _keys("source.cuts", cut, ("lengths", "taken"))
        lengths = _wholes("source.cuts", cut["lengths"])
        done = _wholes("source.cuts", cut["taken"], len(lengths))
        if any(t > n for t, n in zip(done, lengths, strict=True)) or sum(lengths) > size:
            _wrong("source.cuts", cut, "taken at most lengths, lengths at most the data set")
    regions = source["regions"]
    if regions is None:
        return
    _keys("source.regions", regions, ("begin", "lengths", "rules", "sizes"))
    begin = _whole("source.regions.begin", regions["begin"], 0, size)
    lengths = _wholes("source.regions.lengths", regions["lengths"], workers)
    if not any(_wholes("source.regions.sizes", regions["sizes"], workers)):
        _wrong("source.regions.sizes", regions["sizes"], "at least one above 0")
    beyond = any(t > n for t, n in zip(source["taken"], lengths, strict=True))
    if sum(lengths) != size - begin or begin + taken != position or beyond:
        _wrong("source.regions", f"begin={begin}, {sum(lengths)} samples", f"those of position={position}")


def no_source(workers: int) -> dict[str, Any]:
    """The place of a job that has no sampler yet."""
    place = {"epoch": 0, "position": 0, "rounds": 0, "finished": False, "taken": [0] * workers}
    given = dict.fromkeys(CHECKSUMS, "")
    return {"kind": "none", **place, **dict.fromkeys(ORDER), "cuts": [], **given, "regions": None}


def source_state(state: dict[str, Any] | None, workers: int, pieces: int) -> tuple[dict[str, Any], Any]:
    """The place in rounds, from a sampler's or stream's own state, and what is this rank's own: its iterable's."""
    if state is None:
        return no_source(workers), None
    stream = "dataset_size" not in state
    own = {"kind": "stream" if stream else "sampler", "rounds": state["consumed"] // pieces}
    same = {name: state[name] for name in ("epoch", "position", "finished", "taken")}
    order = {name: state.get(name) for name in ORDER} | {"sharded": bool(state.get("sharded", False))}
    cut = {"cuts": state.get("cuts", []), "regions": state.get("regions")}
    given = {name: state.get(name, "") for name in CHECKSUMS}
    return {**own, **same, **order, **cut, **given}, state.get("source")


def own_source(source: dict[str, Any], iterable: Any, pieces: int) -> dict[str, Any] | None:
    """The inverse of `source_state`."""
    if source["kind"] == "none":
        return None
    kept = ("epoch", "position", "finished", "taken", *ORDER, "cuts", *CHECKSUMS, "regions")
    state = {name: source[name] for name in kept}
    return state | {"consumed": source["rounds"] * pieces, "source": iterable}


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        _wrong(name, value, f"a whole number from {least} to {most}")
    return int(value)


def _wholes(name: str, value: Any, length: int | None = None) -> list[int]:
    if type(value) is not list or set(map(type, value)) - {int} or (length is not None and len(value) != length):
        _wrong(name, value, f"a list of {'' if length is None else length} whole numbers")
    if value and not 0 <= min(value) <= max(value) <= MOST:
        _wrong(name, value, f"whole numbers from 0 to {MOST}")
    return list(value)


def _numbers(name: str, value: Any) -> None:
    if type(value) not in (list, tuple) or set(map(type, value)) - {int, float}:
        _wrong(name, value, "a list of numbers")
    if any(type(number) is int and abs(number) > MOST for number in value):
        _wrong(name, value, f"whole numbers up to {MOST}")


def _of_type(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        _wrong(name, value, f"a {kind.__name__}")
    return value


def _keys(name: str, value: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(value, dict) or value.keys() != set(keys):
        _wrong(name, sorted(map(str, value)) if isinstance(value, dict) else value, f"a dict of {', '.join(keys)}")


def _wrong(name: str, value: Any, allowed: str) -> None:
    said = shown(value)
    said = said if len(said) <= 80 else said[:77] + "..."
    raise StateError(f"the controller's state has {name}={said}, allowed is {allowed}. {FIX}")
