"""The part of a checkpoint with the user's objects: a policy, hooks' states, schedules.

They may raise while they load; then all of them are restored. A policy's state is tried on a copy first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynamix.data import Allocations
from dynamix.errors import StateError, shown
from dynamix.policies import Policy
from dynamix.policies.guard import as_written_now
from dynamix.policies.wrappers import load_policy, refuse_learned, unfit
from dynamix.projection import project
from dynamix.runtime import random_state
from dynamix.runtime.facts.job_facts import JobFacts
from dynamix.runtime.part import Part, of_type
from dynamix.runtime.state.packing import Packed, alike, pack, unpack
from dynamix.window import Bounds, Ints, Window

Taking = tuple[Any, Callable[[], None]]  # an object with a state, and the call that loads it
_OUR_PACKAGES = {"dynamix", "dynamix_lab"}  # the laboratory's policies come by entry point; they are checked, too
_SINCE_0_3 = {"nominal_batch_size"}  # keys of a schedule's state that states of 0.2 lack


class InOrder(Part):
    """Objects of one kind, identified by the order in which the loop makes them. A state may load before its object.

    >>> class Hook:
    ...     def state_dict(self): return {"calls": 1}
    ...     def load_state_dict(self, state): print(state)
    >>> hooks = InOrder("hooks")
    >>> hooks.load_state_dict([{"calls": 5}])
    >>> hooks.add(Hook())
    {'calls': 5}

    varies   keys whose values only the user's code checks
    """

    def __init__(self, name: str, varies: tuple[str, ...] = ()) -> None:
        self.name, self.varies = name, varies
        self._objects, self._waiting = list[Any](), dict[int, Any]()

    def add(self, made: Any) -> None:
        """Save this object, too. It loads its state if one was loaded before."""
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
        """Keep the states of objects that do not exist yet."""
        self._waiting = dict(list(enumerate(state))[len(self._objects) :])

    def _require_alike(self, name: str, saved: Any, mine: Any) -> None:
        """Raise `StateError` unless both have the same keys, with values of the same types."""
        if not isinstance(saved, dict) or not saved.keys() <= mine.keys() <= {*saved, *_SINCE_0_3}:
            fix = "make the objects that the saved job had, and then load the state"
            raise StateError(f"the controller's state has {name} for an object of another kind: {fix}")
        for key in saved.keys() - set(self.varies):
            one, other = saved[key], mine[key]
            if isinstance(other, dict) and isinstance(one, dict) and key == "scheduler":
                self._require_alike(f"{name}.{key}", one, other)
            elif not (_kind(one) is _kind(other) or one is None or other is None):
                where = f"where this job has {shown(other)}"
                raise StateError(f"the controller's state has {name}.{key}={shown(one)}, {where}")


def _kind(value: Any) -> type:
    """The type of a value, the same for all numbers."""
    return float if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)


def load_atomically(takings: Sequence[Taking]) -> None:
    """Let each object load its part, in order. If one raises, restore all.

    Raises `StateError`, which names the object that raised.
    """
    before: list[tuple[Any, Packed]] = []
    owner: Any = None
    try:
        for owner, load in takings:
            before.append((owner, pack(owner.state_dict())))  # a copy: loading may write into the returned state
            load()
    except Exception as error:  # any error, because this is the user's code
        lost = [_whose(one) for one, packed in reversed(before) if not _put_back(one, packed)]
        if isinstance(error, StateError) and not lost:
            raise
        told = "nothing of the job was changed"
        if lost:
            told = f"{' and '.join(lost)} could not be put back as it was: make a new one before you train on"
        wrong = f"{_whose(owner)} raised {error!r} while it loaded its part of the controller's state"
        raise StateError(f"{wrong}; {told}") from error


def _put_back(owner: Any, packed: Packed) -> bool:
    """Load the earlier state; returns whether `owner` has it again."""
    try:
        with contextlib.suppress(Exception):  # any error: an object that always raises may be unchanged
            owner.load_state_dict(unpack(packed))
        return alike(owner.state_dict(), unpack(packed))
    except Exception:
        return False


def _whose(owner: Any) -> str:
    """The class of the object whose code runs when `owner` loads its part."""
    while type(owner).__module__.startswith("dynamix.") and getattr(owner, "policy", None) is not None:
        owner = owner.policy
    return str(getattr(owner, "whose", type(owner).__name__))


class Remembered(NamedTuple):
    """A policy's saved state; `here`: it is from the same workers, so the policy may load all of it."""

    state: Any
    here: bool

    def give(self, policy: Policy) -> None:
        """Load it into `policy`; other workers' state is not loaded. Raises `StateError` if it is not this policy's."""
        if self.here:
            load_policy(policy, self.state)
        else:
            refuse_learned(self.state)


class PolicyState(Part):
    """The state of a job's policy. `load_state_dict` and `check` take a `Remembered`."""

    name = "policy"

    def __init__(self, policy: Policy, job: JobFacts, allocations: Allocations) -> None:
        self.policy, self.job, self.allocations = policy, job, allocations

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def check(self, state: Any) -> None:
        """Raise `StateError` unless a copy of the policy can load it, and, if it is one of ours, can then decide.

        A policy that cannot be copied is not tried.
        """
        try:
            trial = copy.deepcopy(self.policy)
        except Exception:  # any error: a user's policy may hold locks or sockets
            return
        before = random_state.capture()
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                state.give(trial)
                layers = _layers(trial)
                if {type(layer).__module__.partition(".")[0] for layer in layers} <= _OUR_PACKAGES:
                    if state.here and _differ(trial.state_dict(), state.state):
                        raise ValueError("it has entries that the policy does not know, or values of another type")
                    _decide(layers, self.allocations.at(self.allocations.begin), self.job.bounds)
        except StateError:
            raise
        except Exception as error:  # a damaged state may fail anywhere
            raise unfit(self.policy, state.state, error) from error
        finally:
            random_state.restore(before)

    def takings(self, state: Any) -> list[Taking]:
        return [(self.policy, lambda: state.give(self.policy))]


def _layers(policy: Any) -> list[Any]:
    """A policy, the policy that it wraps, and so on."""
    layers = [policy]
    while (policy := getattr(policy, "policy", None)) is not None:
        layers.append(policy)
    return layers


def _differ(mine: Any, saved: Any) -> bool:
    """Whether two states of one kind of policy differ."""
    if not isinstance(saved, dict) or mine.keys() != saved.keys():
        return isinstance(saved, dict) and not {"guarded", "paced"} & (mine.keys() ^ saved.keys())
    return not (alike(mine, saved) or alike(mine, as_written_now(saved)))


def _decide(layers: list[Any], sizes: Ints, bounds: Bounds) -> None:
    """Decide on two plausible windows, with the policy and all that it wraps."""
    share = np.maximum(sizes, 1) / max(float(sizes.mean()), 1.0)
    known: dict[str, Any] = {"compute": 0.1 * share, "compute_std": 0.01 * share, "wait": 0.01, "communication": 0.05}
    norms = {"noise": 100.0, "signal": 1.0, "global_norm_sq": 1.0, "gradient_norm_sq": 2.0}
    window = Window.of(sizes, **known, **norms, loss=1.0, loss_std=0.1, loss_change=-0.1, data=0.001, steps=5.0)
    for _ in range(2):
        for layer in layers:
            project(np.asarray(layer.decide(window, bounds)), bounds, current=sizes)
