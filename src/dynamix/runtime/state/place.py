"""Where a job is in its data, counted in rounds: the state of its sampler or stream, whatever the job is made of."""

from __future__ import annotations

import operator
from typing import Any

from dynamix.data import BatchSampler, Stream
from dynamix.data.selection import SELECTED
from dynamix.errors import StateError, shown
from dynamix.runtime.expected import fields, wholes, wrong
from dynamix.runtime.part import Part
from dynamix.runtime.state.packing import alike

ORDER = ("dataset_size", "seed", "shuffle", "partition", "sharded")  # what must be the same in a job that goes on
CHECKSUMS = ("lengths", "order", *SELECTED)  # of what the sampler was given, and its order's name; empty where usual
PLACE = {"epoch": int, "position": int, "rounds": int, "finished": bool, "taken": list}
_STREAM = {**PLACE, **dict.fromkeys((*ORDER, "kind", "cuts", "regions", "iterable"), object), "sharded": bool}
_SAMPLER = {**_STREAM, "dataset_size": int, "shuffle": bool}


class Place(Part):
    """Keeps what was loaded until there is a sampler or stream, which goes on from it.

    Its state holds `kind` (none, sampler, stream), `PLACE` and `ORDER`, `cuts` and `regions` of the epoch, and the
    `iterable`'s own state, which is this rank's. `CHECKSUMS` that are not empty are beside the cuts, so that a state
    without them is as it ever was.
    """

    name = "source"

    def __init__(self, workers: int, accumulate: int) -> None:
        self.workers, self.accumulate = workers, accumulate
        self._source: BatchSampler | Stream | None = None
        self._waiting: dict[str, Any] | None = None

    def begin(self, source: BatchSampler | Stream) -> None:
        """From now on `source` deals the samples. It goes on where a loaded state was."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            source.load_state_dict(waiting)
        self._source = source

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
                raise StateError(
                    f"{name}={shown(saved)} in the checkpoint, {name}={shown(mine)} here: the order of samples would "
                    "differ, and some would be lost or repeated; resume with the data set and sampler that saved it"
                )
        self._source.check_state(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting = self._own(state)
        if self._source is not None:
            self.begin(self._source)

    def _own(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """The sampler's or stream's own state; None: there was none yet."""
        if state["kind"] == "none":
            return None
        given = state["cuts"] if isinstance(state["cuts"], dict) else {"cuts": state["cuts"]}
        counted = {"consumed": state["rounds"] * self.accumulate, "source": state["iterable"]}
        return {**state, **dict.fromkeys(CHECKSUMS, ""), **given, **counted}


def _require_place(state: Any) -> None:
    """Raise `StateError` for what no `Place` wrote, and for a place in which no sampler and no stream can be."""
    kind = state.get("kind")
    if kind == "none":
        if not alike(state, Place(len(wholes("source.taken", state.get("taken"))), 1).state_dict()):
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
    """Of the epoch's order, by jobs of other sizes and by regions: within the data set, and taken as far as said."""
    size, position, regions = state["dataset_size"], state["position"], state["regions"]
    if not size > 0 or position > size or state["finished"] != (position == size):
        said = f"position={position}, finished={state['finished']}"
        wrong("source.position", said, f"at most dataset_size={size}, and finished there")
    if type(cuts) is not list:
        wrong("source.cuts", cuts, "a list")
    for cut in cuts:
        fields("source.cuts", cut, {"lengths": list, "taken": list})
        lengths = wholes("source.cuts", cut["lengths"])
        if _beyond(wholes("source.cuts", cut["taken"], len(lengths)), lengths) or sum(lengths) > size:
            wrong("source.cuts", cut, "taken at most lengths, lengths at most the data set")
    if regions is None:
        return
    fields("source.regions", regions, {"begin": int, "lengths": list, "rules": object, "sizes": list})
    begin, lengths = regions["begin"], wholes("source.regions.lengths", regions["lengths"], len(state["taken"]))
    if not any(wholes("source.regions.sizes", regions["sizes"], len(lengths))):
        wrong("source.regions.sizes", regions["sizes"], "at least one above 0")
    if sum(lengths) != size - begin or begin + taken != position or _beyond(state["taken"], lengths):
        wrong("source.regions", f"begin={begin}, {sum(lengths)} samples", f"those of position={position}")


def _beyond(taken: list[int], lengths: list[int]) -> bool:
    return any(map(operator.gt, taken, lengths))
