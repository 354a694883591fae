"""Objects of the user's take their parts of a saved state: all of them, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from dynamix.errors import StateError
from dynamix.runtime.state.packing import Packed, checksum, pack, unpack

Taking = tuple[Any, Callable[[], None]]  # an object with a state, and what loads its part


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
        return checksum({"": pack(owner.state_dict())}) == checksum({"": packed})
    except Exception:
        return False


def _whose(owner: Any) -> str:
    """The kind of the object whose code `owner` runs to load its part."""
    while type(owner).__module__.startswith("dynamix.") and getattr(owner, "policy", None) is not None:
        owner = owner.policy
    return str(getattr(owner, "whose", type(owner).__name__))
