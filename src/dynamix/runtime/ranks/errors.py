"""Ends the job on all ranks after an error of one, and detects ranks that wait in different calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix.errors import DynamixError, MemoryLimitError, StateError, UsageError

FIRST_PASS = "a comparison before the first forward pass"  # since the start, a load, or a loop left early
UNTRAINED = "controller.step() for a batch that had no forward pass"
ALIKE = "make such a call on every rank, after the same optimizer step"
_KINDS: dict[str, type[DynamixError]] = {kind.__name__: kind for kind in (StateError, MemoryLimitError)}


class JobErrors:
    """Sends this rank's errors and what it waits for to the other ranks, and keeps what they sent.

    ended        the error that ends the job, once this rank knows it
    all_know     whether all ranks know it
    agreements   number of the controller's collective calls that this rank has entered
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: DynamixError | None = None
        self.all_know = False
        self.agreements, self._agreement = 0, ""
        self._own: dict[str, Any] | None = None  # this rank's error that ends the job
        self._setup_errors = 0
        self._setup_error: dict[str, Any] | None = None  # raised before training; None once the caller continues
        self._heard: dict[str, Any] = {"end": None, "agree": [0, []], "setup": [0, None]}

    # ------------------------------------------------------------ of this rank

    def end(self, error: DynamixError) -> None:
        """This rank raises `error`, which ends the job."""
        self.ended, self._own = error, self._words(error)

    def agreeing(self, what: str) -> None:
        """All ranks are about to wait for each other in `what`: record it, for ranks that never enter it."""
        self.setup_goes_on()
        self._agreement, self.agreements = what, self.agreements + 1

    def setup_failed(self, error: Exception) -> None:
        """This rank raises `error` before training. Ranks that wait for it end, unless it continues."""
        self._setup_errors, self._setup_error = self._setup_errors + 1, self._words(error)

    def setup_goes_on(self) -> None:
        """The caller has handled an earlier error, if there was one, and continues."""
        self._setup_error = None

    # ------------------------------------------------------------ of others

    @property
    def setup_error(self) -> DynamixError | None:
        """The error before training of a rank that has not continued, and has had more such errors than this rank."""
        number, told = self._heard["setup"]
        return ended_by(told) if told and number > self._setup_errors else None

    @property
    def unlike(self) -> str | None:
        """The message if other ranks wait in another call than this rank; None if they do not."""
        number, whats = self._heard["agree"]
        others = [what for what in whats if what != self._agreement] if number == self.agreements else []
        if not others:
            return None
        return f"this rank waits in {self._agreement}, another one in {others[0]}: {_fix(self._agreement, *others)}"

    @property
    def beside(self) -> str | None:
        """The message if another rank waits in a call that this rank has not entered; None if none does."""
        number, whats = self._heard["agree"]
        if number <= self.agreements:
            return None
        if whats[0] != FIRST_PASS:
            return f"another rank waits in {whats[0]}, which this rank did not call: {_fix(*whats)}"
        why = "another rank loaded a state, left an epoch early, or ran a first forward pass, and this rank did not"
        do = "call controller.load_state_dict(state) on every rank or on none"
        return f"{why}: {do}; leave a loop early only after the same optimizer step on all ranks"

    # ------------------------------------------------------------ for the watch

    def beat(self) -> dict[str, Any]:
        """This rank's message to the first rank."""
        agree, setup = [self.agreements, self._agreement], [self._setup_errors, self._setup_error]
        return {"end": self._own, "knows": self.ended is not None, "agree": agree, "setup": setup}

    def lead(self, beats: Mapping[int, Mapping[str, Any]], here: set[int]) -> dict[str, Any]:
        """The first rank's message to all, from the `beats` of ranks that have begun; `here` are those alive."""
        ends = [self._heard["end"], *(beat["end"] for beat in beats.values())]
        most = max(beat["agree"][0] for beat in beats.values())
        setups = [beat["setup"] for beat in beats.values() if beat["setup"][1]]
        return {
            "end": next((end for end in ends if end), None),
            "known": all(rank in beats and beats[rank]["knows"] for rank in here),
            "agree": [most, sorted({beat["agree"][1] for beat in beats.values() if beat["agree"][0] == most})],
            "setup": max(setups, key=lambda of: of[0], default=[0, None]),
        }

    def follow(self, told: dict[str, Any]) -> None:
        """Process the first rank's message."""
        self._heard = told
        if self.ended is None and told["end"]:
            self.ended = ended_by(told["end"])
        self.all_know = self.ended is not None and told["known"]

    def _words(self, error: Exception) -> dict[str, Any]:
        return {"rank": self.rank, "kind": type(error).__name__, "message": str(error)}


def _fix(*whats: str) -> str:
    return "train each batch on all ranks or on none" if UNTRAINED in whats else ALIKE


def ended_by(told: Mapping[str, Any]) -> DynamixError:
    """The error to raise on this rank for an error of another."""
    return _KINDS.get(told["kind"], UsageError)(f"rank {told['rank']} ended the job: {told['message']}")
