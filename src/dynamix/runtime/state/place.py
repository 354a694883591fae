"""Where a job is in its data, counted in rounds: the state of its sampler or stream, whatever the job is made of."""

from __future__ import annotations

from typing import Any

from dynamix.data import BatchSampler, Stream
from dynamix.data.selection import SELECTED
from dynamix.errors import StateError, shown
from dynamix.runtime.expected import counters, keys, of_type, whole, wholes, wrong
from dynamix.runtime.part import Part
from dynamix.runtime.state.packing import pack, unpack

SOURCES = ("none", "sampler", "stream")
ORDER = ("dataset_size", "seed", "shuffle", "partition", "sharded")  # what must be the same in a job that goes on
CHECKSUMS = ("lengths", "order", *SELECTED)  # of what the sampler was given, and its order's name; empty where usual
PLACE = ("epoch", "position", "rounds", "finished", "taken")
_EARLY = (
    "Averaging(early=True) was removed in 0.3: write a state at the end of an epoch with dynamix 0.2, or begin a new "
    "job from the model's weights"
)


class Place(Part):
    """Keeps what was loaded until there is a sampler or stream, which goes on from it.

    Its state holds `kind`, `PLACE` and `ORDER`, `cuts` and `regions` of the epoch, `CHECKSUMS` where these are not
    empty, and the `iterable`'s own state, which is this rank's.
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
        kind = "none" if not state else "sampler" if "dataset_size" in state else "stream"
        place = {"epoch": 0, "position": 0, "finished": False, "taken": [0] * self.workers}
        place = {name: state.get(name, value) for name, value in place.items()}
        order = {name: state.get(name) for name in ORDER}
        if state:
            order["sharded"] = bool(order["sharded"])
        cuts, given = state.get("cuts", []), {name: state[name] for name in CHECKSUMS if state.get(name)}
        return {
            "kind": kind,
            "rounds": state.get("consumed", 0) // self.accumulate,
            **place,
            **order,
            # Checksums are beside the cuts, so that a state without them is as it ever was.
            "cuts": pack({"cuts": cuts, **given} if given else cuts),
            "regions": pack(state.get("regions")),
            "iterable": state.get("source"),
        }

    def check(self, state: Any) -> None:
        of_source = self._read(state)
        if of_source is None or self._source is None:
            return
        for name in ORDER:
            saved, mine = of_source[name], getattr(self._source, name, False if name == "sharded" else None)
            if saved != mine or type(saved) is not type(mine):
                raise StateError(
                    f"{name}={shown(saved)} in the checkpoint, {name}={shown(mine)} here: the order of samples would "
                    "differ, and some would be lost or repeated; resume with the data set and sampler that saved it"
                )
        self._source.check_state(of_source)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting = self._read(state)
        if self._source is not None:
            self.begin(self._source)

    def _read(self, state: Any) -> dict[str, Any] | None:
        """A sampler's or stream's own state, from what `state_dict` gave or 0.2 wrote. None: there was none yet."""
        if isinstance(state, dict) and "unused" in state:  # of 0.2
            if any(wholes("source.unused", state["unused"])):
                between = "this state was saved between two meetings of workers that met early: source.unused="
                raise StateError(f"{between}{shown(state['unused'])}. {_EARLY}")
            state = {name: value for name, value in state.items() if name != "unused"}
        keys("source", state, sorted(("kind", *PLACE, *ORDER, "cuts", "regions", "iterable")))
        if state["kind"] not in SOURCES:
            wrong("source.kind", state["kind"], ", ".join(SOURCES))
        taken = wholes("source.taken", state["taken"])
        if state["kind"] == "none":
            if state != Place(len(taken), 1).state_dict():
                wrong("source", "a place", "nothing where no sampler was made")
            return None
        source = {**state, **dict.fromkeys(CHECKSUMS, ""), "cuts": unpack(state["cuts"], "cuts")}
        source["regions"] = unpack(state["regions"], "regions")
        if isinstance(given := source["cuts"], dict):
            keys("source.cuts", given, ("cuts", *[name for name in CHECKSUMS if name in given]))
            source |= given
        _require_place(source, sum(taken))
        del source["kind"]
        return source | {"consumed": source.pop("rounds") * self.accumulate, "source": source.pop("iterable")}


def _require_place(source: dict[str, Any], taken: int) -> None:
    """Raise `StateError` for a place in which no sampler and no stream can be, `taken` samples being taken."""
    counters("source", source, ("epoch", "position", "rounds"))
    for name in ("finished", "sharded", "shuffle")[: 3 if source["kind"] == "sampler" else 2]:
        of_type(f"source.{name}", source[name], bool)
    for name in CHECKSUMS:
        of_type(f"source.{name}", source[name], str)
    if taken > source["position"]:
        wrong("source.taken", f"{taken} samples", f"at most position={source['position']}")
    if source["kind"] == "sampler":
        _require_cuts(source, taken)
    elif source["cuts"] or source["regions"] is not None or source["dataset_size"] is not None:
        wrong("source", "a stream with regions", "neither cuts nor regions nor a size")


def _require_cuts(source: dict[str, Any], taken: int) -> None:
    size = whole("source.dataset_size", source["dataset_size"], 1)
    position = whole("source.position", source["position"], 0, size)
    if source["finished"] != (position == size):
        wrong("source.finished", source["finished"], f"whether position={position} is dataset_size={size}")
    for cut in of_type("source.cuts", source["cuts"], list):
        keys("source.cuts", cut, ("lengths", "taken"))
        lengths = wholes("source.cuts", cut["lengths"])
        done = wholes("source.cuts", cut["taken"], len(lengths))
        if any(t > n for t, n in zip(done, lengths, strict=True)) or sum(lengths) > size:
            wrong("source.cuts", cut, "taken at most lengths, lengths at most the data set")
    regions = source["regions"]
    if regions is None:
        return
    keys("source.regions", regions, ("begin", "lengths", "rules", "sizes"))
    begin, workers = whole("source.regions.begin", regions["begin"], 0, size), len(source["taken"])
    lengths = wholes("source.regions.lengths", regions["lengths"], workers)
    if not any(wholes("source.regions.sizes", regions["sizes"], workers)):
        wrong("source.regions.sizes", regions["sizes"], "at least one above 0")
    beyond = any(t > n for t, n in zip(source["taken"], lengths, strict=True))
    if sum(lengths) != size - begin or begin + taken != position or beyond:
        wrong("source.regions", f"begin={begin}, {sum(lengths)} samples", f"those of position={position}")
