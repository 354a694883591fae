"""The parts of a job whose states are saved: all are checked before any is loaded.

Objects of the user's (policy, hooks' states, schedules) may raise while they load. Then all of them are put back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dynamix.errors import StateError, shown
from dynamix.runtime.expected import of_type
from dynamix.runtime.part import Part
from dynamix.runtime.state.packing import Packed, alike, pack, unpack

Taking = tuple[Any, Callable[[], None]]  # an object with a state, and what loads it


class Registry:
    """Parts by name, in the order in which they load."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts: dict[str, Part] = {}
        for part in parts:
            self.add(part)

    @property
    def own(self) -> list[str]:
        """Names of the parts of which every rank has its own."""
        return [name for name, part in self._parts.items() if part.own]

    @property
    def shared(self) -> list[str]:
        """Names of the others."""
        return [name for name, part in self._parts.items() if not part.own]

    def add(self, part: Part) -> None:
        """Save this part, too. One of the same name leaves its place and its state to it."""
        if (before := self._parts.get(part.name)) is not None:
            part.load_state_dict(before.state_dict())
        self._parts[part.name] = part

    def state_dict(self) -> dict[str, Any]:
        """The states by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def check(self, states: Mapping[str, Any]) -> None:
        """Raise `StateError` for the first state that its part could not take."""
        for name, state in states.items():
            self._parts[name].check(state)

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load states that were checked. Where an object of the user's raises, nothing was changed: a `StateError`."""
        loading = [(part, states[name]) for name, part in self._parts.items() if name in states]
        load_atomically(
            [taking for part, state in loading if isinstance(part, Users) for taking in part.takings(state)]
        )
        for part, state in loading:
            part.load_state_dict(state)


class Users(Part):
    """A part made of objects of the user's."""

    def takings(self, state: Any) -> list[Taking]:
        """Which object loads what, in order."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Take what is left then; does not raise."""


class InOrder(Users):
    """Objects of one kind, known by the order in which the loop makes them. A state may be loaded before its object.

    >>> class Hook:
    ...     def state_dict(self): return {"calls": 1}
    ...     def load_state_dict(self, state): print(state)
    >>> hooks = InOrder("hooks")
    >>> hooks.load_state_dict([{"calls": 5}])
    >>> hooks.add(Hook())
    {'calls': 5}

    varies   keys whose values are the user's own affair
    """

    def __init__(self, name: str, varies: tuple[str, ...] = ()) -> None:
        self.name, self.varies = name, varies
        self._objects, self._waiting = list[Any](), dict[int, Any]()

    def add(self, made: Any) -> None:
        """Save this object, too. It loads the state that waits for it."""
        self._objects.append(made)
        if (state := self._waiting.pop(len(self._objects) - 1, None)) is not None:
            load_atomically([(made, lambda: made.load_state_dict(state))])

    def state_dict(self) -> list[Any]:  # type: ignore[override]
        return [made.state_dict() for made in self._objects]

    def check(self, state: Any) -> None:
        for one in of_type(self.name, state, list):
            of_type(self.name, one, dict)
        for number, (made, one) in enumerate(zip(self._objects, state, strict=False)):
            if one and (mine := made.state_dict()):
                self._require_alike(f"{self.name}[{number}]", one, mine)

    def takings(self, state: Any) -> list[Taking]:
        both = zip(self._objects, state, strict=False)
        return [(made, functools.partial(made.load_state_dict, one)) for made, one in both]

    def load_state_dict(self, state: Any) -> None:
        """Keep what waits for objects to come."""
        self._waiting = dict(list(enumerate(state))[len(self._objects) :])

    def _require_alike(self, name: str, saved: Any, mine: Any) -> None:
        """Raise `StateError` unless both have the same keys, and values of one kind."""
        if not isinstance(saved, dict) or saved.keys() != mine.keys():
            fix = "make the same objects before loading it"
            raise StateError(f"the controller's state has {name} of another kind: {fix}")
        for key in saved.keys() - set(self.varies):
            one, other = saved[key], mine[key]
            if isinstance(other, dict) and isinstance(one, dict) and key == "scheduler":
                self._require_alike(f"{name}.{key}", one, other)
            elif not (type(one) is type(other) or _kind(one) is _kind(other) or one is None or other is None):
                where = f"where this job has {shown(other)}"
                raise StateError(f"the controller's state has {name}.{key}={shown(one)}, {where}")


def _kind(value: Any) -> type:
    """The type of a value; one for all numbers."""
    return float if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)


def load_atomically(takings: Sequence[Taking]) -> None:
    """Let each load its part, in order. Where one raises, all are put back as they were.

    Raises `StateError`, which names the one that raised.
    """
    before: list[tuple[Any, Packed]] = []
    owner: Any = None
    try:
        for owner, load in takings:
            before.append((owner, pack(owner.state_dict())))  # a copy: loading may write into what is returned
            load()
    except Exception as error:  # of any kind: it is the user's code
        lost = [_whose(one) for one, packed in reversed(before) if not _put_back(one, packed)]
        if isinstance(error, StateError) and not lost:
            raise
        told = "nothing of the job was changed"
        if lost:
            told = f"{' and '.join(lost)} could not be put back as it was: make a new one before you train on"
        wrong = f"{_whose(owner)} raised {error!r} while it loaded its part of the controller's state"
        raise StateError(f"{wrong}; {told}") from error


def _put_back(owner: Any, packed: Packed) -> bool:
    """Whether `owner` has the state again that it had."""
    try:
        with contextlib.suppress(Exception):  # of any kind: one that always fails may have changed nothing
            owner.load_state_dict(unpack(packed))
        return alike(owner.state_dict(), unpack(packed))
    except Exception:
        return False


def _whose(owner: Any) -> str:
    """The kind of the object whose code `owner` runs to load its part."""
    while type(owner).__module__.startswith("dynamix.") and getattr(owner, "policy", None) is not None:
        owner = owner.policy
    return str(getattr(owner, "whose", type(owner).__name__))
