"""The only schema of a controller's state: written, checked as a whole, and loaded here.

All counts are of rounds and samples per round. Every state has the same keys, for any job. Parts whose structure varies
are packed (`packing`); `ranks` holds, by rank, each rank's own parts. If every rank decides for itself, a gathered
state also holds each rank's `policy`. A state is checked completely before any of it is applied.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dynamix.errors import StateError, shown
from dynamix.policies import Policy
from dynamix.policies.wrappers import own_part, unguarded
from dynamix.runtime.facts.progress import Progress
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.part import FIX, Part, fields, of_type, whole, wholes, wrong
from dynamix.runtime.random_state import RandomState
from dynamix.runtime.state.packing import checksum, pack, unpack
from dynamix.runtime.state.resume import Division, SourceState
from dynamix.runtime.state.users import InOrder, PolicyState, Remembered, load_atomically

STATE_SCHEMA = 2
RANDOM_UP_TO = 64  # most ranks whose random state a gathered state holds: 10 kB each
_HEAD = ("schema", "version", "checksum")
# All other keys are packed: `torch.distributed.checkpoint` requires the same keys in every state.
_PLAIN = {*Division.KEYS, "progress", "source", "noise_scale"} - {"hosts"}
_OF_SOURCE = ("cuts", "regions")  # packed separately within `source`
_NEAR = 8  # most frames between `torch.distributed.checkpoint` and this function


def asked_by_distributed_checkpoint() -> bool:
    """Whether `torch.distributed.checkpoint` is calling for the states of all ranks.

    If several ranks have a value under one name, it keeps any rank's, perhaps another rank's for each value. So all
    ranks must return equal states. It passes no argument that shows its call. A rank that resumes must know all names,
    so ranks' parts cannot have names of their own: more ranks would look for more names.
    """
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(2))]
    asks = [frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint") for frame in frames[:_NEAR]]
    if not any(asks):
        return False
    told = (frame.f_locals for frame in frames[asks.index(True) :])
    return not next((names["no_dist"] for names in told if "no_dist" in names), False)


class JobState:
    """Everything of a rank's job that is saved. A new name in `parts` is a new key, which earlier states lack.

    parts              by name, in the order of loading; all are checked before any is loaded
    hooks, schedules   the user's, added as the loop makes them
    place              gets the sampler or stream
    random             is called when the loader's iterators are made
    peers              every rank decides for itself
    """

    def __init__(
        self, division: Division, policy: Policy, progress: Progress, recorder: Recorder, *, peers: bool
    ) -> None:
        job, allocations = division.job, division.allocations
        self.hooks, self.schedules = InOrder("hooks", varies=("inner",)), InOrder("schedules")
        self.place, self.random = SourceState(division.workers, job.accumulate), RandomState()
        self._users = PolicyState(policy, job, allocations), self.hooks, self.schedules
        parts: tuple[Part, ...] = *self._users, progress, job.noise_scale, self.place, recorder, self.random
        self.parts = {part.name: part for part in parts}
        self._division, self._peers = division, peers

    def save(self, gather: Callable[[Any], list[Any]] | None = None) -> dict[str, Any]:
        """`Controller.state_dict`.

        gather   returns every rank's argument, by rank: then the state holds each rank's own part. A collective call
        """
        states = {name: part.state_dict() for name, part in self.parts.items()}
        own: dict[str, Any] = {name: states.pop(name) for name, part in self.parts.items() if part.own}
        own["iterable"] = states["source"].pop("iterable")
        if gather is None:
            return self._written(states, {self._division.rank: own})
        own |= {"policy": states["policy"]} if self._peers else {}
        own |= {"rng": None} if self._division.workers > RANDOM_UP_TO else {}
        every = enumerate(gather(pack(own)))
        return self._written(states, {rank: unpack(packed, f"ranks[{rank}]") for rank, packed in every})

    def load(self, state: Any, *, policy: bool = True) -> None:
        """`Controller.load_state_dict`.

        If it raises, the job is unchanged, even if a user's policy or hook's state raised.
        """
        division, own = self._division, [name for name, part in self.parts.items() if part.own]
        shared = [name for name in self.parts if name not in own]
        saved = _read(state, (*division.KEYS, *shared, "ranks"))
        division.check(saved)
        self._require_ranks(own, saved)
        mine = _mine(division, saved)
        states = {name: saved[name] for name in shared if name != "policy"}
        states["source"] = {**saved["source"], "iterable": mine["iterable"]}
        self._check(states)
        _require_together(saved)
        resumed = division.resumed(saved)
        states["progress"] = {**saved["progress"], "opens": resumed.opens}
        states |= {name: mine[name] for name in own if resumed.same or name != "recorder"}
        if policy:
            # If every rank decides for itself, each resumes with its own memory.
            known = (resumed.same and mine.get("policy")) or saved["policy"]
            owner, its, of_turns = self._users[0].policy, known, {"compared", "turns"}
            if isinstance(known, dict) and (getattr(owner, "begins_anew", False) or of_turns <= known.keys()):
                its = own_part(owner, known)
            states["policy"] = Remembered(known if its is None else its, resumed.same and its is not None)
            try:
                self._check({"policy": states["policy"]})
            except StateError:
                if not isinstance(known, dict) or unguarded(known):
                    raise
                del states["policy"]  # its policy remembers nothing, as `static`: this one begins anew
        division.warn_of_batch(saved)
        users = [part for part in self._users if part.name in states]
        load_atomically([taking for part in users for taking in part.takings(states[part.name])])
        for name, part in self.parts.items():
            if name in states:
                part.load_state_dict(states[name])
        division.go_on(saved, resumed)

    def _check(self, states: Mapping[str, Any]) -> None:
        """Raise `StateError` for the first state that its part cannot load."""
        for name, state in states.items():
            self.parts[name].check(state)

    def _require_ranks(self, names: list[str], saved: Mapping[str, Any]) -> None:
        for rank, own in of_type("ranks", saved["ranks"], dict).items():
            whole("ranks", rank, 0, saved["world_size"] - 1)
            known = (*names, "iterable", *(["policy"] if isinstance(own, dict) and "policy" in own else []))
            fields(f"ranks[{rank}]", own, dict.fromkeys(known, object))
            self._check({name: own[name] for name in names})
        if saved["rank"] not in saved["ranks"]:
            wrong("ranks", sorted(saved["ranks"]), f"rank {saved['rank']} among them")

    def _written(self, states: dict[str, Any], ranks: dict[int, Any]) -> dict[str, Any]:
        source = states["source"] | {name: pack(states["source"][name]) for name in _OF_SOURCE}
        values = {**self._division.state_dict(), **states, "source": source, "ranks": ranks}
        state = {"schema": STATE_SCHEMA, "version": sys.modules["dynamix"].__version__, "checksum": ""}
        state |= {name: value if name in _PLAIN else pack(value) for name, value in values.items()}
        return state | {"checksum": checksum(state)}


def _mine(division: Division, saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's own saved parts, by name; if they are missing, what can be taken from another rank's."""
    of_saver = saved["ranks"][saved["rank"]]
    if saved["world_size"] == division.workers and division.rank in saved["ranks"]:
        return dict(saved["ranks"][division.rank])
    # Other ranks' measurements are not this rank's, but all ranks must agree on the open window's number of steps.
    recorder = {**of_saver["recorder"], "series": {}, "before": {}}
    iterable = None if saved["source"].get("sharded") else of_saver["iterable"]
    return {**dict.fromkeys(of_saver), "recorder": recorder, "iterable": iterable}


def _read(state: Any, names: Iterable[str]) -> dict[str, Any]:
    """The values that `_written` got, unpacked. Raises `StateError` for anything that it did not return."""
    if not isinstance(state, Mapping):
        raise StateError(f"the controller's state is {type(state).__name__}, not a dict. {FIX}")
    _require_schema(state)
    expected = {*_HEAD, *names}
    if state.keys() != expected:
        odd = sorted(map(str, state.keys() ^ expected))
        raise StateError(f"the controller's state has missing or unknown keys: {', '.join(odd[:5])}. {FIX}")
    if checksum(dict(state)) != state["checksum"]:
        raise StateError(f"the controller's state was changed after it was saved (its checksum differs). {FIX}")
    values = {name: state[name] if name in _PLAIN else unpack(state[name], name) for name in names}
    source = values["source"]
    if not isinstance(source, dict) or not source.keys() >= {*_OF_SOURCE}:
        wrong("source", source, f"a dict with {' and '.join(_OF_SOURCE)}")
    source = source | {name: unpack(source[name], name) for name in _OF_SOURCE}
    if any(wholes("source.unused", source.pop("unused", []))):  # from 0.2
        raise StateError("a state of Averaging(early=True), removed in 0.3: save it with 0.2 at the end of an epoch")
    return {**values, "source": source}


def _require_schema(state: Mapping[str, Any]) -> None:
    schema = state.get("schema")
    if "schema" not in state:
        inside = "Write controller.load_state_dict(state['controller'])" if "controller" in state else FIX
        raise StateError(f"this is no state of a controller: its keys are {shown(list(state)[:3])}. {inside}")
    if type(schema) is not int or schema != STATE_SCHEMA:
        version = f", saved by dynamix {state['version']}" if isinstance(state.get("version"), str) else ""
        has = f"the controller's state has schema {shown(schema)}{version}; this version reads {STATE_SCHEMA}"
        raise StateError(f"{has}. Go on with the version that saved it, or begin anew from the model's weights")


def _require_together(saved: Mapping[str, Any]) -> None:
    """Raise `StateError` for parts that are each valid, but cannot be from one job."""
    source, samples = saved["source"], saved["progress"]["samples"]
    wholes("source.taken", source["taken"], saved["world_size"])
    if source["kind"] != "none":
        if saved["ledger_rounds"][0] > source["rounds"]:
            wrong("ledger_rounds", saved["ledger_rounds"][0], f"at most source.rounds={source['rounds']}")
        if source["position"] > samples:
            wrong("source.position", source["position"], f"at most samples={samples}")
